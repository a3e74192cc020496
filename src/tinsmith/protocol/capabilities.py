"""What each engine can do, as data: a gateway refuses what the configured engine lacks before anything is queued.

The names of engines are those of the configuration. Tests hold the engines to this table.
"""

from collections.abc import Mapping
from dataclasses import dataclass

from tinsmith.protocol.training import Kind

TRAINING = frozenset(kind for kind in Kind if kind is not Kind.SAMPLE)


@dataclass(frozen=True, slots=True)
class TrainingCapability:
    """`fields`: the ENGINE fields of requests that it reads. `optimizers`: types. `has_custom_losses`: it runs graphs that callers sent."""

    operations: frozenset[Kind]
    losses: frozenset[str]
    optimizers: frozenset[str]
    fields: frozenset[str]
    has_custom_losses: bool = False


@dataclass(frozen=True, slots=True)
class SamplingCapability:
    """`has_streams`: tokens are told while they are drawn."""

    has_streams: bool
    fields: frozenset[str]


_POINTWISE = frozenset({"cross_entropy", "importance_sampling", "ppo", "cispo", "dro", "gspo"})

TRAINING_ENGINES: Mapping[str, TrainingCapability] = {
    "peft": TrainingCapability(
        operations=TRAINING,
        losses=_POINTWISE | {"dpo", "infonce"},
        optimizers=frozenset({"adamw", "sgd"}),
        fields=frozenset({"micro_batch_tokens"}),
        has_custom_losses=True,
    ),
    "fake": TrainingCapability(
        operations=TRAINING,
        losses=_POINTWISE | {"dpo"},
        optimizers=frozenset({"adamw", "sgd"}),
        fields=frozenset(),
    ),
}
SAMPLING_ENGINES: Mapping[str, SamplingCapability] = {
    "hf": SamplingCapability(has_streams=True, fields=frozenset()),
    "fake": SamplingCapability(has_streams=True, fields=frozenset()),
}
