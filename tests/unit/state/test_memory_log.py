"""A lane's bookkeeping: where a new owner goes on, what is missing, how long to wait for it."""

import pytest

from tinsmith.protocol.futures import State
from tinsmith.protocol.training import Kind
from tinsmith.state.lanes import Entry
from tinsmith.state.memory_log import LaneLog

NOW_MS, GRACE_MS = 1000, 120


def lane(*states: tuple[int, State], passed: int, kind: Kind = Kind.FORWARD_BACKWARD) -> LaneLog:
    log = LaneLog("m", "local", "s", "llama", last_ms=NOW_MS, moved_ms=NOW_MS, passed=passed)
    for seq, state in states:
        log.arrive(seq, kind, NOW_MS)
        log.append(Entry(rid=f"t{seq}", seq=seq, kind=kind, digest="d", size=5, tokens=1, state=state, attempts=0))
    return log


DONE, WAITS, FAILED, GONE = State.COMPLETED, State.PENDING, State.FAILED, State.CANCELLED


@pytest.mark.parametrize(
    ("states", "passed", "cursor"),
    [
        ([], 0, 0),
        ([(0, WAITS)], 0, 0),
        ([(0, DONE)], 1, 1),
        ([(0, DONE), (1, WAITS), (2, WAITS)], 1, 1),
        ([(0, DONE), (1, WAITS), (2, WAITS)], 3, 1),  # handed out and given back
        ([(0, DONE), (1, FAILED)], 2, 2),
        ([(0, DONE), (1, FAILED), (2, WAITS)], 2, 2),
        ([(0, DONE), (2, WAITS)], 1, 1),  # 1 may still come
        ([(0, DONE), (2, WAITS)], 3, 2),  # 1 was given up
        ([(0, DONE), (1, GONE), (2, GONE), (3, WAITS)], 1, 3),
        ([(0, DONE), (1, GONE)], 1, 2),
    ],
)
def test_a_new_owner_goes_on_at_the_lowest_seq_that_waits_or_may_still_come(
    states: list[tuple[int, State]], passed: int, cursor: int
) -> None:
    assert lane(*states, passed=passed).cursor() == cursor


def test_the_floor_counts_as_completed() -> None:
    log = lane((4, WAITS), passed=4)
    log.durable = 3
    assert (log.last_completed(), log.cursor()) == (3, 4)


def test_a_missing_seq_is_waited_for_until_the_grace_or_a_barrier() -> None:
    log = lane((2, WAITS), passed=1)
    assert log.missing_wait_ms(1, NOW_MS + 20, GRACE_MS) == 100
    assert log.missing_wait_ms(1, NOW_MS + 200, GRACE_MS) == 0
    log.arrive(3, Kind.OPTIM_STEP, NOW_MS + 20)
    assert log.missing_wait_ms(1, NOW_MS + 20, GRACE_MS) == 0
    assert log.missing_wait_ms(4, NOW_MS + 20, GRACE_MS) == GRACE_MS


def test_what_was_passed_or_voided_is_given_up() -> None:
    log = lane((0, DONE), (2, WAITS), passed=2)
    log.voids.add(5)
    assert [seq for seq in range(7) if log.is_given_up(seq)] == [1, 5]
    assert log.after_given_up(1) == 2
    assert log.after_given_up(5) == 6


def test_a_wide_gap_is_left_in_one_step() -> None:
    log = lane((0, DONE), passed=10**9)
    assert log.after_given_up(1) == 10**9
    log = lane((0, DONE), (10**6, WAITS), passed=10**9)
    assert log.after_given_up(1) == 10**6


def test_trim_drops_up_to_the_seq() -> None:
    log = lane((0, DONE), (1, DONE), (3, WAITS), passed=3)
    log.voids |= {1, 4}
    assert [entry.seq for entry in log.trim(1)] == [0, 1]
    assert (list(log.entries), log.voids) == ([3], {4})
