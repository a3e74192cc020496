"""Facts about base models, and the records of sessions, models, samplers and checkpoints that the catalog keeps."""

from enum import StrEnum

from pydantic import BaseModel, ConfigDict

from tinsmith.protocol.training import LoraConfig, LrSchedule, OptimizerParams

MAX_TAGS = 64  # of a session
MAX_TEXT = 1024  # characters of a tag or a name that is shown
MIN_TTL_S = 3600  # of a checkpoint
MAX_TTL_S = 10 * 365 * 24 * 3600


class Kept(BaseModel):
    """Base of the catalog's records: frozen; fields of a newer writer are ignored."""

    model_config = ConfigDict(frozen=True, extra="ignore")


class BaseModelInfo(Kept):
    """A base model as the server resolved it at start. `path` is a directory on this server and never leaves it."""

    name: str
    path: str
    max_context: int
    vocab_size: int
    eos_token_ids: tuple[int, ...]


class SessionRecord(Kept):
    tenant: str
    session_id: str
    created_ms: int
    tags: list[str] = []
    user_metadata: dict[str, str] | None = None
    sdk_version: str | None = None
    project_id: str | None = None
    display_name: str | None = None
    ended_ms: int | None = None
    end_reason: str | None = None


class ModelRecord(Kept):
    """A training run; its id is also the id of its lane. `optimizer` and `schedule`: of the steps that name none (native face).
    `copied_from`: the path of which this run holds a copy; such a run has no lane and is never trained."""

    tenant: str
    session_id: str
    model_id: str
    base_model: str
    lora: LoraConfig
    optimizer: OptimizerParams | None = None
    schedule: LrSchedule | None = None
    created_ms: int
    user_metadata: dict[str, str] | None = None
    ended_ms: int | None = None
    copied_from: str | None = None


class InflightTarget(Kept):
    """The weights that all inflight samplers of a model share, as its save at `seq` left them. Of several, the highest seq counts."""

    tenant: str
    model_id: str
    seq: int
    artifact: str
    created_ms: int


class SamplerRecord(Kept):
    """A sampling session: a base model, with the artifact of an adapter or without. The artifact is frozen, unless `inflight` says that the
    sampler follows a model's inflight saves, and which one made it."""

    tenant: str
    session_id: str
    sampler_id: str
    base_model: str
    model_path: str | None = None
    artifact: str | None = None
    inflight: InflightTarget | None = None
    created_ms: int


class CheckpointKind(StrEnum):
    """The middle segment of a tinker:// path."""

    TRAINING = "weights"
    SAMPLER = "sampler_weights"
    EXTERNAL = "external_weights"


class CheckpointRecord(Kept):
    """A named, durable artifact. Its catalog id is "<run>/<kind>/<name>". `size_bytes` None: not measured here; the artifact's
    manifest knows."""

    tenant: str
    session_id: str
    run_id: str
    kind: CheckpointKind
    name: str
    artifact: str
    base_model: str
    lora: LoraConfig
    optimizer: OptimizerParams | None = None
    schedule: LrSchedule | None = None
    created_ms: int
    size_bytes: int | None
    expires_ms: int | None = None
    user_metadata: dict[str, str] | None = None

    @property
    def path(self) -> str:
        return checkpoint_path(self.run_id, self.kind, self.name)


def checkpoint_path(run_id: str, kind: CheckpointKind, name: str) -> str:
    return f"tinker://{run_id}/{kind}/{name}"
