"""The weights that inflight samplers of a model share: the newest save counts, in whatever order saves are settled."""

from tinsmith.protocol.sessions import InflightTarget
from tinsmith.state.inflight import InflightTargets, target_writes
from tinsmith.state.memory_store import MemoryStore


def target(seq: int, *, model_id: str = "m", tenant: str = "t") -> InflightTarget:
    return InflightTarget(tenant=tenant, model_id=model_id, seq=seq, artifact=f"{model_id}/{seq}", created_ms=1000 + seq)


async def settle(store: MemoryStore, saved: InflightTarget) -> None:
    store.apply(target_writes(saved, await InflightTargets(store).of_model(saved.tenant, saved.model_id)))


async def test_a_save_replaces_those_before_it():
    store = MemoryStore()
    targets = InflightTargets(store)
    for seq in (2, 5, 11):
        await settle(store, target(seq))
    assert await targets.of_model("t", "m") == [target(11)]
    assert await targets.current(target(2)) == target(11)
    assert await targets.replaced("t") == {"m/2": 1005, "m/5": 1011}
    await targets.forget_replaced("t", ["m/2", "m/2"])
    assert await targets.replaced("t") == {"m/5": 1011}


async def test_a_save_that_is_settled_late_turns_nothing_back():
    store = MemoryStore()
    late = target_writes(target(9), [])  # built before the other was settled
    await settle(store, target(10))
    store.apply(late)
    assert await InflightTargets(store).current(target(9)) == target(10)
    await settle(store, target(12))
    assert await InflightTargets(store).of_model("t", "m") == [target(12)]


async def test_a_sampler_never_goes_below_its_own_save():
    store = MemoryStore()
    await settle(store, target(3))
    assert await InflightTargets(store).current(target(7)) == target(7)


async def test_models_and_tenants_share_nothing():
    store = MemoryStore()
    targets = InflightTargets(store)
    for each in (target(1), target(5, model_id="n"), target(6, tenant="u")):
        await settle(store, each)
    assert await targets.current(target(1)) == target(1)
    await targets.forget(target(1))
    assert await targets.of_model("t", "m") == []
    assert await targets.current(target(1, model_id="n")) == target(5, model_id="n")
    assert (await targets.replaced("t"), await targets.replaced("u")) == ({}, {})
