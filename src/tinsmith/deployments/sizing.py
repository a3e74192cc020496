"""How much memory a configuration needs at its fullest: every adapter slot taken, every row at the context limit, a full micro-batch.

Arithmetic over the base model's config.json; reads nothing else, starts nothing. What a process takes before any weights was measured
(resident MiB of SmolLM2-135M in bf16: trainer 1,106, sampler 844, its weights 257; x86, one thread); everything above it is computed.
Peaks of a trainer came out 5 % above to 15 % below the estimate, by how the tokens lie in their sequences.

Letters: H hidden size, L layers, I intermediate size, V vocabulary of the embedding, A and K attention and key-value heads, D head size.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from pydantic import BaseModel, ValidationError

from tinsmith.config import ModelConfig, ServerConfig
from tinsmith.engines.models import present

MIB = 1024 * 1024
DEFAULT_RANK = 32  # of clients that name none; larger ranks take proportionally more
FLOAT = 4  # bytes of float32
# Resident MiB of processes without weights.
TRAINER_MIB = 849
SAMPLER_MIB = 587
FAKE_MIB = 151
GATEWAY_MIB = 151
CONTROLLER_MIB = 140
JANITOR_MIB = 148
MEMORY_STORE_MIB = 96
RAY_MIB = 560  # gcs_server, raylet, agents and monitor together
MAX_LOGITS = 1 << 25  # of a trainer at once (engines.unembed)
COPIES_OF_A_TRAINED_ADAPTER = 4  # parameters, gradient, two moments


class Architecture(BaseModel):
    """What config.json says of a decoder; a multimodal one says it under text_config."""

    hidden_size: int
    num_hidden_layers: int
    intermediate_size: int
    vocab_size: int
    num_attention_heads: int
    num_key_value_heads: int | None = None
    head_dim: int | None = None
    max_position_embeddings: int
    tie_word_embeddings: bool = False

    @property
    def num_kv_heads(self) -> int:
        return self.num_attention_heads if self.num_key_value_heads is None else self.num_key_value_heads

    @property
    def size_of_head(self) -> int:
        return self.hidden_size // self.num_attention_heads if self.head_dim is None else self.head_dim

    @property
    def attention_width(self) -> int:
        """A x D"""
        return self.num_attention_heads * self.size_of_head

    @property
    def kv_width(self) -> int:
        """K x D"""
        return self.num_kv_heads * self.size_of_head


@dataclass(frozen=True, slots=True)
class Share:
    """Memory of one kind in every process of a role. `each_mib` None: unknown until the base model is fetched."""

    where: str
    what: str
    count: int
    each_mib: float | None
    place: Literal["host", "GPU"] = "host"

    @property
    def total_mib(self) -> float | None:
        return None if self.each_mib is None else self.count * self.each_mib


@dataclass(frozen=True, slots=True)
class Estimate:
    shares: tuple[Share, ...]

    @property
    def host_mib(self) -> float:
        """Of all that is known."""
        return sum((share.total_mib for share in self.shares if share.place == "host" and share.total_mib is not None), 0.0)

    @property
    def is_whole(self) -> bool:
        return all(share.each_mib is not None for share in self.shares)


def estimate(config: ServerConfig, cache: Path) -> Estimate:
    """Base models are looked up in their directories, `cache` and the hub's cache; none is fetched."""
    return Estimate((*_of_server(config), *(share for model in config.models for share in _of_model(model, _architecture(model, cache)))))


def memory_warning(config: ServerConfig, needed: Estimate, machine_mib: float) -> str | None:
    """A line where the estimate exceeds this machine's memory. The workers of a joined cluster may lie elsewhere: none for it."""
    if config.ray.address is not None or needed.host_mib <= machine_mib:
        return None
    return (
        f"memory: at its fullest this configuration needs {needed.host_mib / 1024:.1f} GiB and the machine has {machine_mib / 1024:.1f}; "
        "lower max_adapters, max_rows, max_context, micro_batch_tokens or replicas"
    )


def num_parameters(model: Architecture) -> int:
    """Of a gated decoder with RMS norms and without biases."""
    hidden = model.hidden_size
    attention = hidden * (2 * model.attention_width + 2 * model.kv_width)
    layer = attention + 3 * hidden * model.intermediate_size + 2 * hidden
    embeddings = model.vocab_size * hidden * (1 if model.tie_word_embeddings else 2)
    return embeddings + model.num_hidden_layers * layer + hidden


def num_adapter_parameters(model: Architecture, rank: int) -> int:
    """Of one adapter on every linear layer and the unembedding: rank x (inputs + outputs) each."""
    hidden = model.hidden_size
    attention = 2 * (hidden + model.attention_width) + 2 * (hidden + model.kv_width)
    layer = attention + 3 * (hidden + model.intermediate_size)
    return rank * (model.num_hidden_layers * layer + hidden + model.vocab_size)


def activation_bytes(model: Architecture, num_tokens: int, num_bytes: int) -> int:
    """That a forward pass keeps for the backward pass, and one chunk of logits: as computed, two in float32, and their gradient.

    A token of a layer: input, residual and two norms (4 H), queries, keys and values before and after the rotation, attention and its
    projection's input, and four of the gated layer (4 I), each in the base model's dtype; the norms also in float32 (4 H).
    """
    projections = 2 * (model.attention_width + 2 * model.kv_width) + 2 * model.attention_width
    kept = num_bytes * (4 * model.hidden_size + projections + 4 * model.intermediate_size) + FLOAT * 4 * model.hidden_size
    num_rows = min(num_tokens, max(1, MAX_LOGITS // model.vocab_size))
    return num_tokens * model.num_hidden_layers * kept + num_rows * model.vocab_size * (num_bytes + 3 * FLOAT)


def cache_bytes(model: Architecture, num_tokens: int, num_bytes: int) -> int:
    """Keys and values of that many tokens."""
    return 2 * model.num_hidden_layers * model.kv_width * num_tokens * num_bytes


def _of_server(config: ServerConfig) -> Iterator[Share]:
    yield Share("gateway", "process", config.gateway.replicas, GATEWAY_MIB)
    yield Share("janitor", "process", 1, JANITOR_MIB)
    if config.store.kind == "memory":
        yield Share("memory store", "process", 1, MEMORY_STORE_MIB)
    yield Share("Serve", "controller", 1, CONTROLLER_MIB)
    if config.ray.address is None:
        yield Share("Ray", "daemons", 1, RAY_MIB)


def _of_model(config: ModelConfig, model: Architecture | None) -> Iterator[Share]:
    yield from _of_trainer(config, model)
    yield from _of_sampler(config, model)


def _of_trainer(config: ModelConfig, model: Architecture | None) -> Iterator[Share]:
    trainer, where = config.trainer, f"trainer {config.name}"
    if trainer.engine == "fake":
        yield Share(where, "process", trainer.replicas, FAKE_MIB)
        return
    place = _place(trainer.num_gpus)
    yield Share(where, "process", trainer.replicas, TRAINER_MIB)
    num_bytes = _bytes_of(config)
    adapters = f"{trainer.max_adapters} adapters of rank {DEFAULT_RANK}"
    activations = f"{trainer.micro_batch_tokens} tokens"
    held = trainer.max_adapters * COPIES_OF_A_TRAINED_ADAPTER * FLOAT
    yield Share(where, "weights", trainer.replicas, _mib(model, lambda known: num_parameters(known) * num_bytes), place)
    yield Share(where, adapters, trainer.replicas, _mib(model, lambda known: num_adapter_parameters(known, DEFAULT_RANK) * held), place)
    yield Share(
        where,
        activations,
        trainer.replicas,
        _mib(model, lambda known: activation_bytes(known, trainer.micro_batch_tokens, num_bytes)),
        place,
    )


def _of_sampler(config: ModelConfig, model: Architecture | None) -> Iterator[Share]:
    sampler, where = config.sampler, f"sampler {config.name}"
    if sampler.engine == "fake":
        yield Share(where, "process", sampler.replicas, FAKE_MIB)
        return
    place = _place(sampler.num_gpus)
    yield Share(where, "process", sampler.replicas, SAMPLER_MIB)
    num_bytes = _bytes_of(config)
    adapters = f"{sampler.max_adapters} adapters of rank {DEFAULT_RANK}"
    held = sampler.max_adapters * FLOAT
    context = _context(config, model)
    rows = f"{sampler.max_rows} rows" if context is None else f"{sampler.max_rows} rows of {context} tokens"
    num_tokens = 0 if context is None else sampler.max_rows * context
    yield Share(where, "weights", sampler.replicas, _mib(model, lambda known: num_parameters(known) * num_bytes), place)
    yield Share(where, adapters, sampler.replicas, _mib(model, lambda known: num_adapter_parameters(known, DEFAULT_RANK) * held), place)
    yield Share(where, rows, sampler.replicas, _mib(model, lambda known: cache_bytes(known, num_tokens, num_bytes)), place)


def _context(config: ModelConfig, model: Architecture | None) -> int | None:
    if config.max_context is not None:
        return config.max_context
    return None if model is None else model.max_position_embeddings


def _bytes_of(config: ModelConfig) -> int:
    """Of one number of the base model. "auto" is decided by a probe at the start; the larger of its two outcomes is what must fit."""
    return 2 if config.dtype == "bf16" else FLOAT


def _place(num_gpus: float) -> Literal["host", "GPU"]:
    return "GPU" if num_gpus > 0 else "host"


def _mib(model: Architecture | None, num_bytes: Callable[[Architecture], int]) -> float | None:
    return None if model is None else num_bytes(model) / MIB


def _architecture(config: ModelConfig, cache: Path) -> Architecture | None:
    """None where nothing is known yet: not fetched, or a config.json that says less than it takes."""
    directory = None if config.is_fake else present(config.source, config.name, cache)
    if directory is None:
        return None
    text = (directory / "config.json").read_text(encoding="utf-8")
    for kind in (_Nested, Architecture):
        try:
            found = kind.model_validate_json(text)
        except ValidationError:
            continue
        return found.text_config if isinstance(found, _Nested) else found
    return None


class _Nested(BaseModel):
    text_config: Architecture
