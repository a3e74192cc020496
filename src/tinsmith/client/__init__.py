"""The typed client of Tinsmith's native protocol: an async core (`AsyncClient`) and a thin sync face (`Client`).

Needs httpx and pydantic alone. Knows of the server what `tinsmith.protocol` says, and nothing of how it works.
"""

from tinsmith.client.arrays import PassResult, ResultArray
from tinsmith.client.errors import (
    ClientClosed,
    ClientError,
    ClientValidationError,
    ConnectionFailed,
    HttpError,
    RecordLost,
    ReportedError,
    TaskCancelled,
    TaskFailed,
    UnexpectedAnswer,
    WaitTimedOut,
)
from tinsmith.client.futures import AsyncFuture
from tinsmith.client.sampling import AsyncSamplingClient
from tinsmith.client.service import AsyncClient
from tinsmith.client.streams import AsyncStream
from tinsmith.client.sync import Client, Future, SamplingClient, Stream, TrainingClient
from tinsmith.client.training import AsyncTrainingClient
from tinsmith.protocol.envelopes import QueueState, TaskEnvelope
from tinsmith.protocol.errors import Category, ReasonCode
from tinsmith.protocol.native import AdamWConfig, ChatMessage, Conversation, SgdConfig, TokenBatch
from tinsmith.protocol.native_answers import (
    Capabilities,
    Capacity,
    ModelInfo,
    SampleResult,
    SequenceResult,
    ServerStatus,
    SessionInfo,
    StepResult,
    StreamFrame,
    WeightsLoaded,
    WeightsPublished,
    WeightsSaved,
)
from tinsmith.protocol.training import LrSchedule

__all__ = [
    "AdamWConfig",
    "AsyncClient",
    "AsyncFuture",
    "AsyncSamplingClient",
    "AsyncStream",
    "AsyncTrainingClient",
    "Capabilities",
    "Capacity",
    "Category",
    "ChatMessage",
    "Client",
    "ClientClosed",
    "ClientError",
    "ClientValidationError",
    "ConnectionFailed",
    "Conversation",
    "Future",
    "HttpError",
    "LrSchedule",
    "ModelInfo",
    "PassResult",
    "QueueState",
    "ReasonCode",
    "RecordLost",
    "ReportedError",
    "ResultArray",
    "SampleResult",
    "SamplingClient",
    "SequenceResult",
    "ServerStatus",
    "SessionInfo",
    "SgdConfig",
    "StepResult",
    "Stream",
    "StreamFrame",
    "TaskCancelled",
    "TaskEnvelope",
    "TaskFailed",
    "TokenBatch",
    "TrainingClient",
    "UnexpectedAnswer",
    "WaitTimedOut",
    "WeightsLoaded",
    "WeightsPublished",
    "WeightsSaved",
]
