"""Figures of a bench run: percentiles, rounds of two rivals, their ratio, and whether the machine was quiet. Pure but for the load average.

Only ratios within one run count, since machines are shared: each round measures both rivals, one after the other, and what is reported is
the median over the rounds.
"""

import json
import math
import os
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from statistics import median

QUIET_LOAD = 1.5  # of the load average, in cores, above which a run is marked as disturbed


def percentile(values: Sequence[float], share: float) -> float:
    """The smallest value that `share` of them do not exceed; `share` in (0, 1]. Raises ValueError for no values."""
    if not values:
        raise ValueError("no values were measured")
    ordered = sorted(values)
    return ordered[max(0, math.ceil(len(ordered) * share) - 1)]


@dataclass(frozen=True, slots=True)
class Latencies:
    """Of one rival in one round, in ms."""

    p50_ms: float
    p99_ms: float
    num: int

    @classmethod
    def of(cls, seconds: Sequence[float]) -> "Latencies":
        return cls(1000 * percentile(seconds, 0.5), 1000 * percentile(seconds, 0.99), len(seconds))


@dataclass(frozen=True, slots=True)
class Round:
    ours: Latencies
    floor: Latencies


@dataclass(frozen=True, slots=True)
class Comparison:
    """One line of a report: medians over the rounds, and the ratios' median and spread."""

    case: str
    rounds: tuple[Round, ...]
    load_before: float
    load_after: float

    @property
    def p50_ms(self) -> float:
        return median(turn.ours.p50_ms for turn in self.rounds)

    @property
    def p99_ms(self) -> float:
        return median(turn.ours.p99_ms for turn in self.rounds)

    @property
    def floor_p50_ms(self) -> float:
        return median(turn.floor.p50_ms for turn in self.rounds)

    @property
    def floor_p99_ms(self) -> float:
        return median(turn.floor.p99_ms for turn in self.rounds)

    @property
    def ratios(self) -> list[float]:
        """Of the p50, a round; sorted."""
        return sorted(turn.ours.p50_ms / turn.floor.p50_ms for turn in self.rounds)

    @property
    def was_disturbed(self) -> bool:
        return self.load_before > QUIET_LOAD


def load_average() -> float:
    """Of the last minute."""
    return os.getloadavg()[0]


def table(comparisons: Sequence[Comparison]) -> str:
    """For people."""
    head = f"{'case':<22}{'p50 ms':>9}{'p99 ms':>9}{'floor p50':>11}{'floor p99':>11}{'ratio p50':>11}{'spread':>16}{'load':>7}"
    return "\n".join([head, *map(_row, comparisons)])


def as_json(comparisons: Sequence[Comparison]) -> str:
    """For machines."""
    return json.dumps({"comparisons": [_tree(comparison) for comparison in comparisons]}, indent=1)


def _row(line: Comparison) -> str:
    ratios = line.ratios
    spread = f"{ratios[0]:.2f}-{ratios[-1]:.2f}"
    mark = "  (disturbed)" if line.was_disturbed else ""
    return (
        f"{line.case:<22}{line.p50_ms:>9.2f}{line.p99_ms:>9.2f}{line.floor_p50_ms:>11.2f}{line.floor_p99_ms:>11.2f}"
        f"{median(ratios):>11.2f}{spread:>16}{line.load_before:>7.2f}{mark}"
    )


def _tree(line: Comparison) -> Mapping[str, object]:
    return asdict(line) | {
        "p50_ms": line.p50_ms,
        "p99_ms": line.p99_ms,
        "ratio_p50": median(line.ratios),
        "was_disturbed": line.was_disturbed,
    }
