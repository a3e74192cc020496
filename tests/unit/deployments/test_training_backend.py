"""Commands to engine calls, and answers to outcomes: results as the wire wants them, artifacts, records, refusals."""

import errno
import json
import re
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path

import pytest

from tests.fakes.training import BASE, LORA, SESSION, TENANT, TrainerReplica, World, lane_of, optim, train
from tinsmith.engines.base import Contents
from tinsmith.lifecycle.checkpoints import ArtifactKind, artifact_id
from tinsmith.protocol.errors import InternalError, NotFound, ReasonCode
from tinsmith.protocol.futures import Outcome, State
from tinsmith.protocol.sessions import CheckpointKind, CheckpointRecord, ModelRecord, SamplerRecord
from tinsmith.protocol.tinker_pb2 import ForwardBackwardOutput
from tinsmith.protocol.training import (
    CreateModel,
    Kind,
    LoadWeights,
    LrSchedule,
    SaveWeights,
    SaveWeightsForSampler,
    SgdParams,
    TrainingCommand,
    TrainStep,
)
from tinsmith.protocol.wire import decode_compute_output
from tinsmith.queue.executor import Ready
from tinsmith.state.catalog import checkpoint_write, model_write
from tinsmith.state.inflight import InflightTargets
from tinsmith.state.lanes import Entry, LaneInfo

INFO = LaneInfo(
    lane=lane_of(),
    tenant=TENANT,
    session=SESSION,
    base=BASE,
    is_open=True,
    owner="a",
    token=4,
    durable=-1,
    snapshot=None,
    num_pending=1,
    held_bytes=0,
    last_seq=9,
)
PATH = f"tinker://{lane_of()}/weights/mine"
MODEL = ModelRecord(
    tenant=TENANT,
    session_id=SESSION,
    model_id=lane_of(),
    base_model=BASE,
    lora=LORA,
    optimizer=SgdParams(momentum=0.9),
    schedule=LrSchedule(kind="cosine", total_steps=9),
    created_ms=1,
)


class Backend:
    """A backend with a counter of seqs."""

    def __init__(self, world: World, replica: TrainerReplica) -> None:
        self.world = world
        self.replica = replica
        self.seq = -1

    async def run(self, command: TrainingCommand, info: LaneInfo = INFO) -> Outcome:
        self.seq += 1
        (outcome,) = await self.replica.backend.run(info, [ready(self.seq, command)])
        return outcome


def ready(seq: int, command: TrainingCommand) -> Ready:
    return Ready(entry(seq, command.kind), command)


def entry(seq: int, kind: Kind, state: State = State.COMPLETED) -> Entry:
    return Entry(rid=f"r{seq}", seq=seq, kind=kind, digest="d", size=1, tokens=1, state=state, attempts=0)


def result_of(outcome: Outcome) -> dict[str, object]:
    assert outcome.result is not None
    result: dict[str, object] = json.loads(outcome.result)
    return result


def reason_of(outcome: Outcome) -> ReasonCode:
    assert outcome.failure is not None
    assert not outcome.is_tainted
    return outcome.failure.reason


@pytest.fixture
async def backend(tmp_path: Path) -> AsyncIterator[Backend]:
    world = World(tmp_path)
    world.store.apply([model_write(MODEL)])
    backend = Backend(world, world.build("a", capacity=2))
    assert result_of(await backend.run(CreateModel(lora=LORA))) == {"model_id": lane_of(), "type": "create_model"}
    yield backend
    await world.close()


async def test_compute_answers_protobuf_and_a_step_json(backend: Backend) -> None:
    outcome = await backend.run(train(1, 2, 3))
    assert outcome.result is not None
    message = ForwardBackwardOutput.FromString(outcome.result)
    assert set(message.metrics) == {"loss:sum"}
    step = result_of(await backend.run(optim()))
    assert set(step) == {"metrics"}


async def test_a_train_step_and_an_evaluation_answer_protobuf(backend: Backend) -> None:
    outcome = await backend.run(TrainStep(train(1, 2, 3), optim()))
    assert outcome.result is not None
    output = decode_compute_output(outcome.result)
    assert set(output.metrics) == {"loss:sum", "unclipped_grad_l2:mean"}
    assert [tensor.shape for tensor in output.logprobs] == [(3,)]
    outcome = await backend.run(replace(train(1, 2, 3, backward=False), metrics_only=True))
    assert outcome.result is not None
    output = decode_compute_output(outcome.result)
    assert (output.logprobs, set(output.metrics)) == ((), {"loss:sum", "nll:sum", "tokens:sum", "weight:sum"})
    assert reason_of(await backend.run(TrainStep(train(99_999), optim()))) is ReasonCode.VALIDATION_FAILED


async def test_commands_of_one_lane_can_share_a_call(backend: Backend) -> None:
    outcomes = await backend.replica.backend.run(INFO, [ready(1, train(1)), ready(2, optim())])
    assert [outcome.failure for outcome in outcomes] == [None, None]
    assert backend.replica.engine.calls["run"] == 1


async def test_a_refusal_of_the_engine_is_an_outcome_without_taint(backend: Backend) -> None:
    assert reason_of(await backend.run(train(99_999))) is ReasonCode.VALIDATION_FAILED
    backend.replica.engine._max_rank = 4
    other = lane_of(1)
    info = replace(INFO, lane=other)
    assert reason_of(await backend.run(CreateModel(lora=LORA), info)) is ReasonCode.VALIDATION_FAILED
    commands: list[TrainingCommand] = [train(1), optim(), SaveWeights(name="x"), SaveWeightsForSampler(name="x")]
    for command in [*commands, LoadWeights(path=PATH, artifact="a/b/c/1-1", optimizer=False)]:
        assert reason_of(await backend.run(command, info)) is ReasonCode.RESOURCE_NOT_FOUND


async def test_save_weights_names_a_durable_checkpoint(backend: Backend) -> None:
    await backend.run(train(1))
    outcome = await backend.run(SaveWeights(name="mine", ttl_seconds=60, user_metadata={"k": "v"}))
    assert result_of(outcome) == {"path": PATH}
    assert outcome.artifact == artifact_id(TENANT, lane_of(), ArtifactKind.TRAINING, seq=2, token=4)
    files = backend.world.checkpoints.read(outcome.artifact)
    (write,) = outcome.writes
    assert write.value is not None
    record = CheckpointRecord.model_validate_json(write.value)
    assert write == checkpoint_write(record)
    assert record.path == PATH
    assert (record.tenant, record.session_id, record.run_id, record.kind) == (TENANT, SESSION, lane_of(), CheckpointKind.TRAINING)
    assert (record.lora, record.base_model, record.user_metadata) == (LORA, BASE, {"k": "v"})
    assert (record.optimizer, record.schedule) == (MODEL.optimizer, MODEL.schedule)
    assert record.size_bytes == sum(map(len, files.values()))
    assert record.expires_ms == backend.world.now_ms + 60_000


async def test_a_name_is_visible_only_after_the_settle_and_then_taken(backend: Backend) -> None:
    first = await backend.run(SaveWeights(name="mine", ttl_seconds=1))
    with pytest.raises(NotFound):
        await backend.world.catalog.checkpoint(TENANT, PATH)
    backend.world.store.apply(first.writes)
    taken = await backend.run(SaveWeights(name="mine"))
    assert reason_of(taken) is ReasonCode.REQUEST_REJECTED
    assert taken.failure is not None
    assert taken.failure.message.startswith(f"name 'mine': {PATH} exists already; choose another name")
    again = await backend.run(SaveWeights(name="mine", overwrite=True))
    assert again.failure is None
    assert again.artifact != first.artifact
    backend.world.now_ms += 1000  # an expired name is free
    assert (await backend.run(SaveWeights(name="mine"))).failure is None


async def test_a_named_sampler_save_is_immutable(backend: Backend) -> None:
    outcome = await backend.run(SaveWeightsForSampler(name="mine"))
    assert result_of(outcome) == {"path": f"tinker://{lane_of()}/sampler_weights/mine"}
    assert outcome.artifact is not None
    assert set(backend.world.checkpoints.read(outcome.artifact)) == {"adapter_config.json", "adapter_model.safetensors"}
    backend.world.store.apply(outcome.writes)
    assert reason_of(await backend.run(SaveWeightsForSampler(name="mine"))) is ReasonCode.REQUEST_REJECTED


async def test_an_ephemeral_sampler_save_makes_a_sampling_session_and_no_path(backend: Backend) -> None:
    sampler_id = f"{SESSION}:sample:3"
    outcome = await backend.run(SaveWeightsForSampler(sampling_session_id=sampler_id))
    assert result_of(outcome) == {"sampling_session_id": sampler_id}
    backend.world.store.apply(outcome.writes)
    record = await backend.world.catalog.sampler(TENANT, sampler_id)
    assert record == SamplerRecord(
        tenant=TENANT,
        session_id=SESSION,
        sampler_id=sampler_id,
        base_model=BASE,
        artifact=outcome.artifact,
        created_ms=backend.world.now_ms,
    )
    assert reason_of(await backend.run(SaveWeightsForSampler())) is ReasonCode.VALIDATION_FAILED


async def test_inflight_saves_of_a_model_share_what_the_newest_saved(backend: Backend) -> None:
    targets = InflightTargets(backend.world.store)
    records = []
    for number in range(3):
        await backend.run(train(1, 2))
        sampler_id = f"{SESSION}:sample:{number}"
        outcome = await backend.run(SaveWeightsForSampler(sampling_session_id=sampler_id, mode="inflight"))
        assert result_of(outcome) == {"sampling_session_id": sampler_id}
        before = await targets.of_model(TENANT, lane_of())
        backend.world.store.apply(outcome.writes)
        records.append(await sampler_of(backend, sampler_id))
        assert records[-1].artifact == outcome.artifact
        assert (await targets.of_model(TENANT, lane_of()))[-1:] != before, "the target moves with the settle"
    owns = [record.inflight for record in records if record.inflight is not None]
    assert [(await targets.current(own)).artifact for own in owns] == [records[-1].artifact] * 3
    await backend.run(SaveWeightsForSampler(sampling_session_id=f"{SESSION}:sample:9"))
    assert (await targets.current(owns[0])).artifact == records[-1].artifact, "a snapshot moves nothing"


async def sampler_of(backend: Backend, sampler_id: str) -> SamplerRecord:
    return await backend.world.catalog.sampler(TENANT, sampler_id)


@pytest.mark.parametrize(
    "artifact", [None, "local/other/sampler_weights/1-1", artifact_id(TENANT, lane_of(), ArtifactKind.SAMPLER, seq=9, token=4)]
)
async def test_a_save_under_a_used_sampler_number_is_refused_and_the_sampler_stays(backend: Backend, artifact: str | None) -> None:
    sampler_id = f"{SESSION}:sample:3"
    held = SamplerRecord(tenant=TENANT, session_id=SESSION, sampler_id=sampler_id, base_model=BASE, artifact=artifact, created_ms=1)
    await backend.world.catalog.add_sampler(held)
    outcome = await backend.run(SaveWeightsForSampler(sampling_session_id=sampler_id))
    assert reason_of(outcome) is ReasonCode.REQUEST_REJECTED
    assert outcome.failure is not None
    assert re.search(r"sampler number 3 .*; count on$", outcome.failure.message)
    assert (outcome.writes, await sampler_of(backend, sampler_id)) == ((), held)
    assert backend.replica.engine.calls["capture"] == 0
    assert (await backend.run(SaveWeightsForSampler(sampling_session_id=f"{SESSION}:sample:4"))).failure is None


async def test_of_two_models_that_save_under_one_sampler_number_at_once_the_second_is_refused(
    backend: Backend, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Both have found the number free; neither has settled."""
    other = replace(INFO, lane=lane_of(1))
    await backend.run(CreateModel(lora=LORA), other)

    async def free(*_: object) -> None:
        return None

    monkeypatch.setattr(backend.replica.backend, "_check_number_is_free", free)
    command = SaveWeightsForSampler(sampling_session_id=f"{SESSION}:sample:3")
    first, second = await backend.run(command), await backend.run(command, other)
    assert (first.failure, reason_of(second)) == (None, ReasonCode.REQUEST_REJECTED)
    backend.world.store.apply((*first.writes, *second.writes))
    assert (await sampler_of(backend, f"{SESSION}:sample:3")).artifact == first.artifact
    assert list(backend.world.checkpoints.artifacts()) == [first.artifact]  # what was captured for nothing is gone


async def test_a_save_under_a_sampler_number_that_is_run_again_is_the_same_save(backend: Backend) -> None:
    """By the same owner, and by the next one after a crash before the settle."""
    command = SaveWeightsForSampler(sampling_session_id=f"{SESSION}:sample:3")
    for info in (INFO, INFO, replace(INFO, token=5)):
        (outcome,) = await backend.replica.backend.run(info, [ready(1, command)])
        assert outcome.failure is None
        assert outcome.artifact == artifact_id(TENANT, lane_of(), ArtifactKind.SAMPLER, seq=1, token=info.token)
        backend.world.store.apply(outcome.writes)
        assert (await sampler_of(backend, f"{SESSION}:sample:3")).artifact == outcome.artifact


@pytest.mark.parametrize("optimizer", [True, False])
async def test_a_checkpoint_loads_into_its_model_and_into_a_new_one(backend: Backend, optimizer: bool) -> None:
    engine = backend.replica.engine
    await backend.run(train(1, 2))
    await backend.run(optim())
    saved, save = engine.weights(lane_of()), await backend.run(SaveWeights(name="mine"))
    assert save.artifact is not None
    await backend.run(train(3))
    await backend.run(optim())
    load = LoadWeights(path=PATH, artifact=save.artifact, optimizer=optimizer)
    assert result_of(await backend.run(load)) == {"path": PATH, "model_id": lane_of(), "type": "load_weights"}
    info = replace(INFO, lane=lane_of(1))
    created = await backend.run(load.model_copy(update={"lora": LORA}), info)
    assert result_of(created)["model_id"] == lane_of(1)
    assert engine.weights(lane_of()) == engine.weights(lane_of(1)) == saved


@pytest.mark.proves("R11")
@pytest.mark.parametrize("is_new", [True, False])
async def test_a_load_that_fails_leaves_no_trace(backend: Backend, is_new: bool) -> None:
    engine = backend.replica.engine
    await backend.run(train(1, 2))
    await backend.run(optim())
    save = await backend.run(SaveWeights(name="mine"))
    sampler = await backend.run(SaveWeightsForSampler(name="mine"))
    assert save.artifact is not None
    assert sampler.artifact is not None
    broken = backend.world.root / save.artifact / "optimizer.safetensors"
    broken.write_bytes(broken.read_bytes()[:-4])
    before = engine.capture(lane_of(), Contents.SNAPSHOT)
    info = replace(INFO, lane=lane_of(1)) if is_new else INFO
    for artifact in (save.artifact, sampler.artifact):
        load = LoadWeights(path=PATH, artifact=artifact, optimizer=True, lora=LORA if is_new else None)
        assert reason_of(await backend.run(load, info)) is ReasonCode.VALIDATION_FAILED
    assert engine.capture(lane_of(), Contents.SNAPSHOT) == before
    assert engine.residents == {lane_of()}
    engine.create_adapter("another", LORA)


@pytest.mark.parametrize("is_new", [True, False])
async def test_a_load_that_the_storage_refuses_leaves_the_adapter_as_it_was(
    backend: Backend, monkeypatch: pytest.MonkeyPatch, is_new: bool
) -> None:
    def refuse(artifact: str) -> None:
        raise OSError(errno.EIO, "bucket/secret is away")

    await backend.run(train(1, 2))
    save = await backend.run(SaveWeights(name="mine"))
    assert save.artifact is not None
    before = backend.replica.engine.capture(lane_of(), Contents.SNAPSHOT)
    monkeypatch.setattr(backend.world.checkpoints, "read", refuse)
    load = LoadWeights(path=PATH, artifact=save.artifact, optimizer=True, lora=LORA if is_new else None)
    outcome = await backend.run(load, replace(INFO, lane=lane_of(1)) if is_new else INFO)
    assert outcome.failure is not None
    assert (outcome.failure.reason, outcome.is_tainted) == (ReasonCode.INTERNAL_ERROR, False)
    assert ("load again" in outcome.failure.message, "secret" in outcome.failure.message) == (True, False)
    assert backend.replica.engine.capture(lane_of(), Contents.SNAPSHOT) == before
    assert backend.replica.engine.residents == {lane_of()}


@pytest.mark.parametrize(
    ("error", "condition"),
    [
        (
            OSError(errno.ENOSPC, "No space left on device", "/srv/secret"),
            "is full: nothing was saved, .*; ask the operator for space, then save",
        ),
        (OSError(errno.EROFS, "Read-only file system", "/srv/secret"), r"failed \(Read-only file system\): nothing was saved"),
        (OSError("/srv/secret is odd"), r"failed \(unknown\): nothing was saved"),
    ],
)
async def test_a_save_that_the_storage_refuses_fails_and_says_why_without_a_path(
    backend: Backend, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, error: OSError, condition: str
) -> None:
    def refuse(artifact: str, files: object) -> None:
        raise error

    before = backend.replica.engine.capture(lane_of(), Contents.SNAPSHOT)
    monkeypatch.setattr(backend.world.checkpoints, "write", refuse)
    for command in (SaveWeights(name="mine"), SaveWeightsForSampler(name="mine")):
        outcome = await backend.run(command)
        assert reason_of(outcome) is ReasonCode.INTERNAL_ERROR
        assert outcome.failure is not None
        assert re.search(condition, outcome.failure.message)
        assert "/srv" not in outcome.failure.message
    assert "/srv/secret" in caplog.text
    assert backend.replica.engine.capture(lane_of(), Contents.SNAPSHOT) == before
    with pytest.raises(InternalError, match=condition):
        await backend.replica.backend.snapshot(INFO, 1)


async def test_a_snapshot_is_restored_with_what_came_after_it(backend: Backend) -> None:
    world, engine = backend.world, backend.replica.engine
    await world.submit(0, CreateModel(lora=LORA))  # writes the model's record
    await backend.run(train(1, 2))
    artifact = await backend.replica.backend.snapshot(INFO, 1)
    await backend.run(optim())
    expected = engine.weights(lane_of())
    await backend.replica.backend.drop(lane_of())

    async def fetch(wanted: Entry) -> TrainingCommand:
        assert wanted.seq == 2
        return optim()

    info = replace(INFO, durable=1, snapshot=artifact)
    assert await backend.replica.backend.restore(info, [entry(1, Kind.FORWARD_BACKWARD), entry(2, Kind.OPTIM_STEP)], fetch) == []
    assert engine.weights(lane_of()) == expected
    await backend.replica.backend.discard(artifact)
    assert list(world.checkpoints.artifacts()) == []


async def test_a_replay_that_does_not_succeed_again_is_no_restore(backend: Backend) -> None:
    async def fetch(wanted: Entry) -> TrainingCommand:
        return CreateModel(lora=LORA) if wanted.seq == 0 else train(99_999)

    with pytest.raises(InternalError, match="seq 1 succeeded before"):
        await backend.replica.backend.restore(INFO, [entry(0, Kind.CREATE_MODEL), entry(1, Kind.FORWARD_BACKWARD)], fetch)
