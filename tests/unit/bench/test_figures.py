"""What a bench run reports."""

import json

import pytest

from tinsmith.bench.figures import Comparison, Latencies, Round, as_json, percentile, table


def latencies(p50_ms: float) -> Latencies:
    return Latencies(p50_ms=p50_ms, p99_ms=2 * p50_ms, num=10)


def comparison(*pairs: tuple[float, float], load: float = 0.1) -> Comparison:
    return Comparison("case", tuple(Round(latencies(ours), latencies(floor)) for ours, floor in pairs), load, load)


@pytest.mark.parametrize(("share", "expected"), [(0.5, 5), (0.99, 10), (0.1, 1), (1.0, 10)])
def test_a_percentile_is_a_value_that_was_measured(share: float, expected: float) -> None:
    assert percentile([10, 9, 8, 7, 6, 5, 4, 3, 2, 1], share) == expected


def test_nothing_measured_has_no_percentile() -> None:
    with pytest.raises(ValueError, match="no values"):
        percentile([], 0.5)


def test_latencies_are_in_ms() -> None:
    assert Latencies.of([0.001, 0.002, 0.003]) == Latencies(p50_ms=2.0, p99_ms=3.0, num=3)


def test_the_ratio_is_taken_within_each_round() -> None:
    assert comparison((2.0, 1.0), (10.0, 2.0), (3.0, 3.0)).ratios == [1.0, 2.0, 5.0]


def test_the_table_shows_the_medians_beside_the_floor_and_marks_a_disturbed_run() -> None:
    quiet, disturbed = table([comparison((2.0, 1.0))]), table([comparison((2.0, 1.0), load=3.0)])
    assert quiet.splitlines()[1].split() == ["case", "2.00", "4.00", "1.00", "2.00", "2.00", "2.00-2.00", "0.10"]
    assert disturbed.endswith("(disturbed)")


def test_the_figures_are_written_whole() -> None:
    (line,) = json.loads(as_json([comparison((2.0, 1.0), (4.0, 1.0))]))["comparisons"]
    assert (line["p50_ms"], line["ratio_p50"], len(line["rounds"]), line["was_disturbed"]) == (3.0, 3.0, 2, False)
