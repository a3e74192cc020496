"""What the native protocol answers under /native/v1, for server and client alike.

Answers of queued commands are the `result` of a TaskEnvelope. A reader ignores fields that it does not know (`Answer`), so each may grow.
"""

from typing import Literal

from tinsmith.protocol.envelopes import Answer, ErrorPayload
from tinsmith.protocol.sampling import StopReason
from tinsmith.protocol.training import AdamParams, LrSchedule, SgdParams


class EncodedArray(Answer):
    """Base64 of little-endian bytes."""

    dtype: Literal["float32", "int64"]
    shape: tuple[int, ...]
    data: str


class SessionInfo(Answer):
    session_id: str
    created_ms: int
    tags: tuple[str, ...] = ()
    metadata: dict[str, str] | None = None
    project_id: str | None = None
    display_name: str | None = None
    ended_ms: int | None = None
    end_reason: str | None = None


class SessionList(Answer):
    sessions: tuple[SessionInfo, ...]


class ModelInfo(Answer):
    """`next_seq`: one above the highest seq id that the server has of this model."""

    model_id: str
    session_id: str
    base_model: str
    lora_rank: int
    optimizer: AdamParams | SgdParams | None = None
    schedule: LrSchedule | None = None
    metadata: dict[str, str] | None = None
    created_ms: int
    ended_ms: int | None = None
    next_seq: int | None = None


class ModelList(Answer):
    models: tuple[ModelInfo, ...]


class SamplerInfo(Answer):
    sampler_id: str
    base_model: str
    checkpoint: str | None = None


class ModelCreated(Answer):
    model_id: str


class PassResult(Answer):
    """`logprobs`, `embeddings`: one array a sequence, in order. Metrics are sums unless their name says otherwise."""

    logprobs: tuple[EncodedArray, ...] = ()
    embeddings: tuple[EncodedArray, ...] = ()
    metrics: dict[str, float]


class StepResult(Answer):
    metrics: dict[str, float]


class WeightsSaved(Answer):
    checkpoint: str


class WeightsLoaded(Answer):
    model_id: str
    checkpoint: str


class WeightsPublished(Answer):
    """One of the two, as it was asked for."""

    checkpoint: str | None = None
    sampler_id: str | None = None


class SequenceResult(Answer):
    """`text` where the server has a tokenizer for the base model."""

    tokens: tuple[int, ...]
    logprobs: tuple[float, ...]
    stop_reason: StopReason
    text: str | None = None


class SampleResult(Answer):
    sequences: tuple[SequenceResult, ...]
    prompt_logprobs: tuple[float | None, ...] | None = None
    topk_prompt_logprobs: tuple[tuple[tuple[int, float], ...] | None, ...] | None = None


class StreamFrame(Answer):
    """One line of a stream. `delta`: tokens of one sequence, from position `offset`; they take the place of any that were told from there
    on, where a sample had to run again on hardware that does not repeat to the last bit. `done`: the last line of a stream that succeeded,
    with the whole result. `error`: the last line of one that failed."""

    type: Literal["start", "delta", "done", "error"]
    request_id: str | None = None
    sequence: int | None = None
    offset: int | None = None
    tokens: tuple[int, ...] = ()
    logprobs: tuple[float, ...] = ()
    result: SampleResult | None = None
    error: ErrorPayload | None = None


class TaskList(Answer):
    """A TaskEnvelope each. They are left unread here, so that a reader who cannot read one still has the others."""

    tasks: tuple[dict[str, object], ...]


class CancelAnswer(Answer):
    cancelled: bool
    state: str


class LossCapability(Answer):
    """`inputs`: name -> dtype; a name that ends with '?' may be left out."""

    inputs: dict[str, str]
    config: dict[str, float]
    is_paired: bool
    output: str


class BaseModelCapability(Answer):
    name: str
    max_context: int
    vocab_size: int
    training_engine: str
    sampling_engine: str
    operations: tuple[str, ...]
    losses: tuple[str, ...]
    engine_fields: tuple[str, ...]
    has_chat: bool
    numerics: Literal["exact", "packed"]
    sample_logprobs: Literal["tempered", "raw"]


class Capabilities(Answer):
    protocol_version: str
    server_version: str
    features: tuple[str, ...]
    losses: dict[str, LossCapability]
    base_models: tuple[BaseModelCapability, ...]
    limits: dict[str, float]


class ProcessStatus(Answer):
    """A process with a lease. `num_slots` 0: not bounded."""

    process_id: str
    role: str
    base_model: str | None
    node: str
    pid: int
    is_healthy: bool
    is_draining: bool
    num_used: int
    num_slots: int


class QueueStatus(Answer):
    """A lane of the caller's tenant with work. `age_s`: how long the command at its head has waited; 0 while all of its work runs."""

    lane: str
    base_model: str
    role: str
    owner: str | None
    num_pending: int
    age_s: float


class ServerStatus(Answer):
    server_version: str
    store: str
    processes: tuple[ProcessStatus, ...]
    queues: tuple[QueueStatus, ...]


class RoleCapacity(Answer):
    """Over all living processes of a role; `num_pending` and `age_s` over all tenants."""

    num_processes: int
    num_healthy: int
    num_used: int
    num_slots: int
    num_pending: int
    age_s: float


class Capacity(Answer):
    """Base model -> role -> how much of it is taken."""

    base_models: dict[str, dict[str, RoleCapacity]]
