"""What came of an item, and how it is told: a line of JSON. Needs no SDK, so that whoever started a run elsewhere can read it."""

import json
from dataclasses import asdict, dataclass
from typing import Literal


@dataclass(frozen=True, slots=True)
class Verdict:
    """`detail`: one line, of what differs or why the item was not run."""

    number: str
    title: str
    outcome: Literal["passed", "failed", "not run"]
    detail: str = ""

    def to_json(self) -> str:
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> "Verdict":
        """Raises ValueError and TypeError for another text than `to_json` writes."""
        return cls(**json.loads(text))
