"""Verdicts: what an item's end is told as."""

import pytest

from tinsmith.conformance import runner
from tinsmith.conformance.items import Item, Mismatch, NotRun, Target, expect_equal
from tinsmith.conformance.verdicts import Verdict

TARGET = Target("http://127.0.0.1:1", "tml-key", "org/tiny", 100)


class Service:
    """A client of the SDK, as far as a run sees one."""

    def __init__(self) -> None:
        self.num_closed = 0

    def close(self, status: str) -> "Service":
        assert status == "success"
        self.num_closed += 1
        return self

    def result(self, timeout: float) -> None:
        raise TimeoutError(f"a server that does not answer within {timeout}")


def verdict_of(error: Exception | None) -> Verdict:
    def run(target: Target) -> None:
        if error is not None:
            raise error

    [verdict] = runner.run(TARGET, [Item("7", "a title", run)])
    return verdict


@pytest.mark.parametrize(
    ("error", "outcome", "detail"),
    [
        (None, "passed", ""),
        (Mismatch("status: expected 1,\n got 2"), "failed", "status: expected 1, got 2"),
        (NotRun("needs a server"), "not run", "needs a server"),
        (ValueError("broken"), "failed", "ValueError: broken"),
    ],
)
def test_how_an_item_ends(error: Exception | None, outcome: str, detail: str) -> None:
    assert verdict_of(error) == Verdict("7", "a title", outcome, detail)  # type: ignore[arg-type]


def test_a_verdict_survives_its_line() -> None:
    verdict = Verdict("14a", "a title", "failed", 'says "no"')
    assert Verdict.from_json(verdict.to_json()) == verdict


def test_sessions_of_an_item_are_finished_even_where_it_fails_and_the_server_does_not_answer() -> None:
    service = Service()

    def run(target: Target) -> None:
        target.services.append(service)  # type: ignore[arg-type]
        expect_equal(1, 2, "numbers")

    [verdict] = runner.run(TARGET, [Item("1", "a title", run)])
    assert verdict.detail == "numbers: expected 2, got 1"
    assert service.num_closed == 1
    assert TARGET.services == []


def test_numbers_are_unique_and_every_entry_of_the_list_has_one() -> None:
    numbers = [held.number for held in runner.ITEMS]
    assert len(set(numbers)) == len(numbers)
    assert {int(number.rstrip("abcdefg")) for number in numbers} == set(range(1, 28))


def test_what_stops_the_server_runs_last() -> None:
    assert [held.number for held in runner.ITEMS[-2:]] == ["19", "20"]
