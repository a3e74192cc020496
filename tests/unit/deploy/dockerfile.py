"""A Dockerfile taken apart: its stages and their instructions, lines joined, comments left out. Knows what this project's file uses."""

import json
import shlex
from dataclasses import dataclass, field
from pathlib import Path


@dataclass(frozen=True, slots=True)
class Instruction:
    """`words`: the arguments, of the JSON form or of the shell form. `flags`: `--name=value`."""

    name: str
    flags: dict[str, str]
    words: tuple[str, ...]
    text: str


@dataclass(slots=True)
class Stage:
    base: str
    name: str
    instructions: list[Instruction] = field(default_factory=list)

    def all(self, name: str) -> list[Instruction]:
        return [instruction for instruction in self.instructions if instruction.name == name]

    def last(self, name: str) -> Instruction:
        return self.all(name)[-1]


def read_stages(path: Path) -> dict[str, Stage]:
    stages: dict[str, Stage] = {}
    for line in _lines(path.read_text()):
        name, _, text = line.partition(" ")
        instruction = _parse(name.upper(), text.strip())
        if instruction.name == "FROM":
            base, keyword, stage = instruction.words
            assert keyword.upper() == "AS", "every stage has a name"
            current = stages[stage] = Stage(base, stage)
        else:
            current.instructions.append(instruction)
    return stages


def _lines(text: str) -> list[str]:
    kept = [line.strip() for line in text.splitlines() if line.strip() and not line.strip().startswith("#")]
    joined = "\n".join(kept).replace("\\\n", " ")
    return joined.splitlines()


def _parse(name: str, text: str) -> Instruction:
    flags = {}
    while text.startswith("--"):
        flag, _, text = text.partition(" ")
        key, _, value = flag.removeprefix("--").partition("=")
        flags[key] = value
        text = text.strip()
    body = text.removeprefix("CMD ").strip() if name == "HEALTHCHECK" else text
    words = json.loads(body) if body.startswith("[") else shlex.split(body)
    return Instruction(name, flags, tuple(words), text)
