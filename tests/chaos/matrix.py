"""The fault matrix as it is filled: one row a fault, kept in a file that outlives the run. `docs/scripts/fault_matrix.py` renders it."""

import json
import os
from dataclasses import asdict, dataclass, field
from pathlib import Path

FILE = Path(__file__).resolve().parents[2] / "out" / "fault-matrix.json"


@dataclass(frozen=True, slots=True)
class Row:
    """What one fault came to.

    group: the part of the table. saw: what callers got, an outcome or a reason code. seconds: the longest wait of any of them, which was
    asserted to be at most `bound_s`; `bound` says what that follows from. then: what the next good request got.
    """

    group: str
    fault: str
    where: str
    saw: str
    seconds: float
    bound_s: float
    bound: str
    then: str


@dataclass
class Matrix:
    """Rows by what names them: a run of a part of the tests replaces those rows alone."""

    path: Path = FILE
    _rows: dict[str, Row] = field(default_factory=dict)

    def note(self, row: Row) -> None:
        """Also asserts the bound: no row is noted without."""
        assert row.seconds <= row.bound_s, f"{row.fault} in {row.where}: {row.seconds:.1f} s, over its bound of {row.bound_s:.1f} s"
        held = json.loads(self.path.read_text()) if self.path.is_file() else {"rows": {}}
        held["rows"][f"{row.group} / {row.fault} / {row.where}"] = asdict(row)
        held["num_cpus"] = os.cpu_count()
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self.path.write_text(json.dumps(held, indent=1))
