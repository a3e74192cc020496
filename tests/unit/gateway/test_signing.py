"""Signed links: nothing in one can be changed, and it ends."""

from urllib.parse import parse_qsl

import pytest

from tinsmith.gateway.signing import LINK_S, Link, Links
from tinsmith.protocol.errors import NotFound
from tinsmith.state.memory_store import MemoryStore

NOW_S = 1_000


class Clock:
    def __init__(self) -> None:
        self.s = NOW_S

    def __call__(self) -> int:
        return 1000 * self.s


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def links(clock: Clock) -> Links:
    return Links(MemoryStore(clock))


async def query_of(links: Links, expires_s: int | None = None) -> dict[str, str]:
    link = Link("GET", "t", "t/m/weights/1-1", "f", await links.expiry_s() if expires_s is None else expires_s)
    return dict(parse_qsl(await links.query(link)))


async def refusal(links: Links, query: dict[str, str], method: str = "GET", artifact: str = "t/m/weights/1-1", file: str = "f") -> str:
    with pytest.raises(NotFound) as caught:
        await links.check(method, artifact, file, query)
    return caught.value.message


async def test_a_link_is_accepted_by_every_process(links: Links, clock: Clock) -> None:
    query = await query_of(links)
    assert int(query["expires"]) == NOW_S + LINK_S
    await links.check("GET", "t/m/weights/1-1", "f", query)
    clock.s += LINK_S - 1
    await links.check("GET", "t/m/weights/1-1", "f", query)


async def test_a_link_ends(links: Links, clock: Clock) -> None:
    query = await query_of(links)
    clock.s += LINK_S
    await refusal(links, query)


async def test_each_part_is_bound(links: Links) -> None:
    query = await query_of(links)
    later = query | {"expires": str(int(query["expires"]) - 1)}
    words = {
        await refusal(links, query, method="PUT"),
        await refusal(links, query, artifact="t/m/weights/2-1"),
        await refusal(links, query, file="g"),
        await refusal(links, query, file=""),
        await refusal(links, query | {"tenant": "u"}),
        await refusal(links, later),
        await refusal(links, query | {"signature": "0" * 64}),
        await refusal(links, query | {"signature": "\u00e9"}),
        await refusal(links, query | {"key": "unknown"}),
        await refusal(links, query | {"expires": "9" * 5000}),
        await refusal(links, query | {"expires": "-1"}),
        await refusal(links, {}),
    }
    assert len(words) == 1, "each refusal says the same"


async def test_no_link_lives_longer_than_an_hour(links: Links) -> None:
    await refusal(links, await query_of(links, NOW_S + LINK_S + 1))


async def test_parts_cannot_be_shifted_into_one_another(links: Links) -> None:
    texts = {Link("GET", "a\0b", "c", "d", 1).signed_text(), Link("GET", "a", "b\0c", "d", 1).signed_text()}
    assert len(texts) == 2
