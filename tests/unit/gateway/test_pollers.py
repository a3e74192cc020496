"""retrieve_futures: the long poll over all samples of one client of a sampling session."""

import asyncio
from collections.abc import Coroutine
from typing import Any, TypeVar

import pytest

from tests.fakes.face import WORKER, Face, open_face
from tests.unit.gateway.test_futures import SAMPLE
from tests.unit.gateway.test_sampling import body_of, sampler
from tinsmith.protocol.errors import StateContention, ValidationFailed
from tinsmith.protocol.futures import Outcome
from tinsmith.state.feeds import CLIENT_SPAN
from tinsmith.state.lanes import SETTLED

NEVER_MS = 10**12

Answer = TypeVar("Answer")


def asked(sampler_id: str, cursor: int = 0, *, client: int = 0, **changes: object) -> dict[str, object]:
    target = {"type": "sampling_session", "sampling_session_id": sampler_id, "cloned_sampler_id": client}
    return {"target": target, "prev_cursor": cursor, "retrieved_request_ids": [], **changes}


async def sampled(face: Face, sampler_id: str, *seq_ids: int) -> list[str]:
    return [str((await face.ok("/asample", body_of(sampler_id, seq_id=seq_id)))["request_id"]) for seq_id in seq_ids]


async def finish(face: Face, sampler_id: str) -> None:
    await face.ok(f"/sessions/{sampler_id.partition(':')[0]}/finish", {})


async def polled(face: Face, sampler_id: str, cursor: int = 0, **changes: object) -> tuple[list[tuple[str, str]], int]:
    """(state, request id) of what is told at once, and the cursor."""
    answer = await face.ok("/retrieve_futures", asked(sampler_id, cursor, timeout=0, **changes))
    return [(told["state"], told["request_id"]) for told in answer["completions"]], answer["cursor"]


async def begun(face: Face, request: Coroutine[Any, Any, Answer]) -> "asyncio.Task[Answer]":
    """A poll that waits."""
    poll = asyncio.create_task(request)
    while not face.services.polls.num_waiting:  # noqa: ASYNC110 - nothing tells when a request has come so far
        await asyncio.sleep(0)
    return poll


# What is told


async def test_every_end_is_told_and_answers_when_it_is_fetched(face: Face):
    sampler_id = await sampler(face)
    finished, broken, dropped, waiting = await sampled(face, sampler_id, 0, 1, 2, 3)
    await face.lanes.cancel("local", dropped)
    await face.lanes.renew(WORKER)
    one, other = await face.lanes.pool_take(face.services.base_model("org/tiny").name, WORKER.id, 2, 10**6)
    failure = Outcome.failed(ValidationFailed("no"), is_tainted=False)
    await face.lanes.pool_settle(WORKER.id, [(other, failure), (one, Outcome(result=SAMPLE))])
    told, cursor = await polled(face, sampler_id)
    assert told == [("failed", dropped), ("failed", broken), ("finished", finished)]
    assert (await face.retrieve(finished)).json()["type"] == "sample"
    for rid in (dropped, broken):
        assert (await face.retrieve(rid)).json()["category"] == "user"
    face.advance(60_000)
    await face.lanes.sweep(stuck_ms=1000, orphan_ms=NEVER_MS)
    told, last = await polled(face, sampler_id, cursor)
    assert (told, last > cursor) == ([("failed", waiting)], True)
    assert await polled(face, sampler_id, last) == ([], last)


async def test_a_finished_sample_brings_its_size_and_is_then_fetched_whole(face: Face):
    sampler_id = await sampler(face)
    (rid,) = await sampled(face, sampler_id, 0)
    await face.run_samples(Outcome(result=SAMPLE))
    answer = await face.ok("/retrieve_futures", asked(sampler_id, timeout=0))
    assert answer["completions"] == [{"state": "finished", "request_id": rid, "response_payload_uncompressed_size": len(SAMPLE)}]
    assert (await face.retrieve(rid, "application/x-protobuf", allow_metadata_only=False)).content == SAMPLE


async def test_clients_are_told_of_their_own_block_of_seq_ids(face: Face):
    sampler_id = await sampler(face)
    own, joined = await sampled(face, sampler_id, 5, 3 * CLIENT_SPAN)
    await face.run_samples(Outcome(result=SAMPLE))
    assert (await polled(face, sampler_id))[0] == [("finished", own)]
    answer = await face.ok("/retrieve_futures", asked(sampler_id, client=3, timeout=0))
    assert [told["request_id"] for told in answer["completions"]] == [joined]


async def test_what_is_reported_as_retrieved_is_freed_and_asked_for_again(face: Face):
    sampler_id = await sampler(face)
    done, kept = await sampled(face, sampler_id, 0, 1)
    await face.run_samples(Outcome(result=SAMPLE))
    _, cursor = await polled(face, sampler_id)
    for _ in range(2):
        assert await polled(face, sampler_id, cursor, retrieved_request_ids=[done, "nonsense"]) == ([], cursor)
    assert (await face.retrieve(done)).status_code == 410
    assert (await face.retrieve(kept)).status_code == 200


async def test_more_than_an_answer_holds_follows_under_its_cursor(face: Face, monkeypatch):
    monkeypatch.setattr("tinsmith.gateway.tinker.pollers.MAX_COMPLETIONS", 2)
    sampler_id = await sampler(face)
    rids = await sampled(face, sampler_id, 0, 1, 2)
    await face.run_samples(Outcome(result=SAMPLE))
    first, cursor = await polled(face, sampler_id)
    second, _ = await polled(face, sampler_id, cursor)
    assert [rid for _, rid in (*first, *second)] == rids
    assert len(first) == 2


# How long it waits


async def test_a_poll_is_woken_by_an_end(face: Face):
    sampler_id = await sampler(face)
    poll = await begun(face, face.ok("/retrieve_futures", asked(sampler_id)))
    (rid,) = await sampled(face, sampler_id, 0)  # what comes after the poll began counts too
    await face.run_samples(Outcome(result=SAMPLE))
    answer = await asyncio.wait_for(poll, 0.5)
    assert [told["request_id"] for told in answer["completions"]] == [rid]
    assert face.services.polls.num_waiting == 0


async def test_an_end_between_the_look_and_the_sleep_is_not_missed(face: Face, monkeypatch):
    sampler_id = await sampler(face)
    await sampled(face, sampler_id, 0)
    look = face.lanes.completions

    async def slow(*args: object) -> object:
        page = await look(*args)
        monkeypatch.setattr(face.lanes, "completions", look)
        await face.run_samples(Outcome(result=SAMPLE))
        return page

    monkeypatch.setattr(face.lanes, "completions", slow)
    answer = await asyncio.wait_for(face.ok("/retrieve_futures", asked(sampler_id)), 0.5)
    assert len(answer["completions"]) == 1


@pytest.mark.parametrize(("timeout", "at_least_s", "at_most_s"), [(0, 0, 0.5), (0.2, 0.19, 0.8), (None, 0.9, 3), (3600, 0.9, 3)])
async def test_a_poll_ends_with_its_window(face: Face, timeout, at_least_s, at_most_s):
    """The window of the face under test is a second."""
    sampler_id = await sampler(face)
    started = asyncio.get_running_loop().time()
    assert await face.ok("/retrieve_futures", asked(sampler_id, timeout=timeout)) == {"completions": [], "cursor": 0}
    assert at_least_s <= asyncio.get_running_loop().time() - started <= at_most_s


async def test_a_gateway_that_stops_ends_its_polls(face: Face):
    sampler_id = await sampler(face)
    poll = await begun(face, face.ok("/retrieve_futures", asked(sampler_id)))
    face.services.polls.end()
    assert (await asyncio.wait_for(poll, 0.5))["completions"] == []


# Ends of sessions and stores


async def test_the_end_of_a_session_is_told_first_and_then_answers_404(face: Face):
    sampler_id = await sampler(face)
    done, pending = await sampled(face, sampler_id, 0, 1)
    await face.lanes.renew(WORKER)
    (entry,) = await face.lanes.pool_take("org/tiny", WORKER.id, 1, 1)
    await face.lanes.pool_settle(WORKER.id, [(entry, Outcome(result=SAMPLE))])
    _, cursor = await polled(face, sampler_id)
    poll = await begun(face, face.ok("/retrieve_futures", asked(sampler_id, cursor)))
    await finish(face, sampler_id)
    answer = await asyncio.wait_for(poll, 0.5)
    assert answer["completions"] == [{"state": "failed", "request_id": pending}]
    for rid in (done, pending):
        assert (await face.retrieve(rid)).status_code == 404
    assert await polled(face, sampler_id, answer["cursor"]) == ([], answer["cursor"]), "a last report is heard"
    vain = await face.post("/retrieve_futures", asked(sampler_id, answer["cursor"]))
    assert (vain.status_code, "has ended" in vain.json()["detail"]) == (404, True)


async def test_a_store_that_is_emptied_ends_the_poll_at_once(face: Face):
    sampler_id = await sampler(face)
    await sampled(face, sampler_id, 0)
    await face.run_samples(Outcome(result=SAMPLE))
    _, cursor = await polled(face, sampler_id)
    await sampled(face, sampler_id, 1)
    poll = await begun(face, face.post("/retrieve_futures", asked(sampler_id, cursor)))
    await face.store.flush_all()
    assert (await asyncio.wait_for(poll, 0.9)).status_code == 404


async def test_a_cursor_of_another_store_is_the_beginning(face: Face):
    sampler_id = await sampler(face)
    (rid,) = await sampled(face, sampler_id, 0)
    await face.run_samples(Outcome(result=SAMPLE))
    told, cursor = await polled(face, sampler_id, 10**9)
    assert told == [("finished", rid)]
    assert cursor == (await face.lanes.tail([SETTLED]))[SETTLED]


async def test_a_store_that_is_away_is_503(face: Face, monkeypatch):
    sampler_id = await sampler(face)

    async def away(*_: object) -> None:
        raise StateContention("the store is away")

    monkeypatch.setattr(face.lanes, "completions", away)
    assert (await face.post("/retrieve_futures", asked(sampler_id))).status_code == 503


@pytest.mark.parametrize("sampler_id", ["nope", "other:sample:0"])
async def test_a_poll_of_a_sampler_that_is_not_the_callers_is_404(face: Face, sampler_id):
    answer = await face.post("/retrieve_futures", asked(sampler_id))
    assert (answer.status_code, sampler_id in answer.json()["detail"]) == (404, True)


@pytest.mark.parametrize(
    ("changes", "names"),
    [
        ({"target": {"type": "model", "sampling_session_id": "s"}}, "target.type"),
        ({"target": {}}, "target.sampling_session_id"),
        ({"target": {"sampling_session_id": "s", "cloned_sampler_id": -1}}, "target.cloned_sampler_id"),
        ({"prev_cursor": -1}, "prev_cursor"),
        ({"prev_cursor": 2**63}, "prev_cursor"),
        ({"timeout": -1}, "timeout"),
        ({"retrieved_request_ids": [1]}, "retrieved_request_ids"),
    ],
)
async def test_a_bad_poll_names_the_field(face: Face, changes, names):
    answer = await face.post("/retrieve_futures", asked("s") | changes)
    assert (answer.status_code, names in answer.json()["detail"]) == (422, True)


async def test_the_poller_can_be_switched_off():
    for is_on in (True, False):
        async with open_face(gateway={"session_poller": is_on, "compress_uploads": is_on}) as face:
            flags = await face.ok("/client/config", {"sdk_version": "0.38.0"})
            assert (flags["sample_use_retrieve_futures"], flags["proto_compress_fwdbwd"]) == (is_on, is_on)
            assert flags["sample_join_sampling_session"] is True
