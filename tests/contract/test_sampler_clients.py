"""Numbers of the clients of a sampling session: each is given out once."""

import asyncio

from tests.contract.conftest import State
from tinsmith.state.sampler_clients import SamplerClients


async def test_clients_that_join_at_once_get_numbers_of_their_own(state: State) -> None:
    handles = [SamplerClients((await state.connect())[0]) for _ in range(4)]
    numbers = await asyncio.gather(*(handles[index % 4].join("local", "s:sample:0") for index in range(64)))
    assert sorted(numbers) == list(range(1, 65))


async def test_each_session_of_each_tenant_counts_for_itself(state: State) -> None:
    clients = SamplerClients(state.store)
    joined = [await clients.join(*session) for session in (("a", "s"), ("a", "s"), ("a", "t"), ("b", "s"))]
    assert joined == [1, 2, 1, 1]
    for _ in range(2):
        await clients.forget("a", "s")
    assert [await clients.join("a", "t"), await clients.join("b", "s")] == [2, 2]
