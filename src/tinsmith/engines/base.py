"""The engine seams: typed commands in, typed answers out. Engines know nothing of state, queue or HTTP.

A refusal is an answer: a `TinsmithError` in a command's place means that the command was refused before anything was mutated, and the
others of the call are not affected. A raised exception means that the call failed as a whole and the named adapters may hold half
an effect; the caller then drops and rebuilds them.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Protocol

from tinsmith.protocol.errors import TinsmithError, ValidationFailed
from tinsmith.protocol.sampling import Sample, SampleOutput
from tinsmith.protocol.training import ComputeOutput, EngineCommand, LoraConfig, OptimOutput

Files = Mapping[str, bytes]  # relative file name -> content
Answer = ComputeOutput | OptimOutput | TinsmithError

# The files of a PEFT folder.
ADAPTER_CONFIG = "adapter_config.json"
ADAPTER_MODEL = "adapter_model.safetensors"


class Contents(StrEnum):
    """How much of an adapter a capture holds; each contains the ones above it."""

    SAMPLER = "sampler"  # a PEFT folder: adapter_config.json, adapter_model.safetensors
    CHECKPOINT = "checkpoint"  # + fp32 masters, the optimizer, its moments and step count
    SNAPSHOT = "snapshot"  # + unspent gradients


@dataclass(frozen=True, slots=True)
class Job:
    """One command for one model. Randomness, if any, derives from (model seed, seq) alone, so a replay repeats it."""

    model_id: str
    seq: int
    command: EngineCommand


def check_optimizer(taken: str, num_steps: int, asked: str) -> None:
    """Raises ValidationFailed for a step of another optimizer than the ones that a model has taken: their states do not convert."""
    if num_steps and taken != asked:
        raise ValidationFailed(
            f"optimizer: the model has taken {num_steps} steps of {taken} and takes none of {asked}; send {taken}, or load a checkpoint "
            "without its optimizer to begin anew"
        )


class TrainingEngine(Protocol):
    """Runs in one thread at a time (the admission gate sees to it), `ping` excepted."""

    @property
    def capacity(self) -> int:
        """How many adapters can be resident."""
        ...

    def create_adapter(self, model_id: str, lora: LoraConfig) -> None:
        """A fresh adapter, B = 0. Raises ValidationFailed for a config that the base model cannot honour."""
        ...

    def drop_adapter(self, model_id: str) -> None:
        """Forget the adapter; unknown ids are ignored."""
        ...

    def run(self, jobs: Sequence[Job]) -> list[Answer]:
        """One answer a job, in order. forward_backward adds to the adapter's gradient only at its end; train_step does that and steps, or
        neither. A model that has taken steps of one optimizer refuses those of another."""
        ...

    def capture(self, model_id: str, contents: Contents) -> Files: ...

    def load(self, model_id: str, files: Files, *, optimizer: bool) -> None:
        """Replace an existing adapter's weights (and with `optimizer` its moments; else they start fresh) from a CHECKPOINT. Checks
        everything before it touches anything: ValidationFailed leaves no trace."""
        ...

    def restore(self, model_id: str, lora: LoraConfig, files: Files) -> None:
        """Create the adapter as a SNAPSHOT holds it, bit for bit, in place of any of that id."""
        ...

    def ping(self) -> None:
        """Return if the engine can work. May be called from another thread while a call runs."""
        ...


Ticket = str


@dataclass(frozen=True, slots=True)
class Drawn:
    """New tokens of one sequence of a watched request, from position `offset` on."""

    ticket: Ticket
    sequence: int
    offset: int
    tokens: list[int]
    logprobs: list[float]


class SamplingEngine(Protocol):
    """A batch that never drains: requests join and leave between steps. All calls come from one thread at a time."""

    @property
    def max_rows(self) -> int:
        """How many sequences decode at once; more wait inside the engine."""
        ...

    def has_adapter(self, key: str) -> bool: ...

    def load_adapter(self, key: str, files: Files) -> None:
        """Make a SAMPLER artifact available under its key; evicts the least recently used idle one if there is no room."""
        ...

    def add(self, ticket: Ticket, sample: Sample, scope: str = "") -> None:
        """Queue a request. What was computed of a prompt is used again only for requests of the same scope. Raises a TinsmithError that
        refuses the request (context limit, unknown adapter), with nothing kept."""
        ...

    def cancel(self, ticket: Ticket) -> None:
        """Forget a request and free its rows; unknown tickets are ignored."""
        ...

    def watch(self, ticket: Ticket) -> None:
        """Let `drawn` report the request; called right after its `add`. Unknown tickets are ignored; unwatched requests cost nothing."""
        ...

    def step(self) -> list[tuple[Ticket, SampleOutput | TinsmithError]]:
        """Advance every running sequence by one token (or one prefill) and answer the requests that finished."""
        ...

    def drawn(self) -> list[Drawn]:
        """What watched requests that run have drawn since the last call, each sequence in order and without gaps. Tokens with whose text a
        stop string may begin are held back until that is decided. A request that has ended reports no more: its answer has the rest."""
        ...

    @property
    def num_live(self) -> int:
        """Requests that have not finished."""
        ...

    def ping(self) -> None: ...
