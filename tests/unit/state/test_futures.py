"""The life of a record: legal changes, its stored form, the failures that lanes write."""

from dataclasses import replace
from itertools import product

import pytest

from tinsmith.protocol.errors import Cancelled, InternalError, ReasonCode
from tinsmith.protocol.futures import FutureRecord, Outcome, State
from tinsmith.protocol.training import Kind
from tinsmith.state import futures

PENDING = FutureRecord(
    rid="t1", tenant="local", session="s", lane="m", seq=3, kind=Kind.OPTIM_STEP, digest="d", state=State.PENDING, submitted_ms=100
)
OUTCOMES = [
    Outcome(result=b"12345"),
    Outcome.failed(InternalError("boom: ünïcode\nsecond line"), is_tainted=True),
    Outcome.failed(ValueError("hidden"), is_tainted=True),
    Outcome.failed(Cancelled("stop"), is_tainted=False),
]


@pytest.mark.proves("R54")
def test_only_the_changes_of_a_records_life_are_legal() -> None:
    legal = {(old, new) for old, new in product(State, State) if futures.may_become(old, new)}
    assert legal == {
        (State.PENDING, State.RUNNING),
        (State.PENDING, State.FAILED),
        (State.PENDING, State.CANCELLED),
        (State.RUNNING, State.PENDING),
        (State.RUNNING, State.COMPLETED),
        (State.RUNNING, State.FAILED),
        (State.RUNNING, State.CANCELLED),
    }


def test_a_record_starts_returns_and_settles() -> None:
    running = futures.started(PENDING, 200)
    assert (running.state, running.started_ms) == (State.RUNNING, 200)
    again = futures.started(futures.returned(running), 300)
    assert (again.state, again.started_ms) == (State.RUNNING, 200)
    ended = futures.settled(again, Outcome(result=b"12345"), 400)
    assert (ended.state, ended.ended_ms, ended.result_size, ended.failure) == (State.COMPLETED, 400, 5, None)


def test_what_is_pending_cannot_complete_and_what_ended_cannot_go_on() -> None:
    with pytest.raises(ValueError, match="t1 cannot become completed: it is pending"):
        futures.settled(PENDING, Outcome(result=b""), 1)
    ended = futures.settled(futures.started(PENDING, 1), Outcome(result=b""), 2)
    for change in (lambda: futures.started(ended, 3), lambda: futures.returned(ended), lambda: futures.settled(ended, OUTCOMES[1], 3)):
        with pytest.raises(ValueError, match="it is completed"):
            change()


@pytest.mark.parametrize("outcome", OUTCOMES)
@pytest.mark.proves("R26")
def test_a_settled_record_has_a_result_or_a_failure(outcome: Outcome) -> None:
    ended = futures.settled(futures.started(PENDING, 1), outcome, 2)
    assert (ended.result_size is None) == (ended.failure is not None) == (ended.state is not State.COMPLETED)


@pytest.mark.parametrize(
    "record",
    [
        PENDING,
        replace(PENDING, kind=Kind.SAMPLE, seq="17"),
        futures.started(PENDING, 5),
        *(futures.settled(futures.started(PENDING, 5), outcome, 9) for outcome in OUTCOMES),
        replace(futures.settled(futures.started(PENDING, 5), OUTCOMES[0], 9), fetched_ms=11),
    ],
)
def test_the_stored_form_gives_the_record_back(record: FutureRecord) -> None:
    fields = futures.record_to_fields(record)
    assert all(isinstance(value, str) for value in fields.values())
    assert futures.record_from_fields(fields | {"of_a_newer_schema": "x"}) == record


@pytest.mark.parametrize(("max_attempts", "times"), [(1, "once"), (2, "twice"), (3, "three times"), (5, "5 times")])
def test_a_worn_out_command_tells_how_often(max_attempts: int, times: str) -> None:
    failure = futures.worn_out(max_attempts)
    assert failure.message == f"the worker died {times} while running this command"
    assert failure.reason is ReasonCode.INTERNAL_ERROR


def test_the_lanes_own_failures_name_their_reason() -> None:
    assert futures.given_up(7).reason is ReasonCode.REQUEST_REJECTED
    assert "its turn was given up" in futures.given_up(7).message
    assert futures.cancelled().reason is ReasonCode.CANCELLED
    assert Outcome(failure=futures.cancelled()).state is State.CANCELLED
    assert futures.stuck(1_800_000).reason is ReasonCode.DEADLINE_EXCEEDED
    assert "1800 s" in futures.stuck(1_800_000).message


def test_a_samples_lane_names_base_model_and_tenant() -> None:
    assert futures.pool_lane("llama", "local") == "pool:llama:local"
