"""Messages to one process, through its inbox topic (`lanes.inbox_topic`): an operator's order, a sample to forget, tokens of a stream.

Data only; `Lanes.post` carries it. An inbox may repeat a message and, after a resync, lack some: each says what it is about, and no
guarantee rests on one.
"""

from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field, TypeAdapter


class _Message(BaseModel):
    model_config = ConfigDict(frozen=True, extra="ignore")


class DrainOrder(_Message):
    """Take nothing more, finish, snapshot, hand back, end."""

    type: Literal["drain"] = "drain"


class SampleAbort(_Message):
    """Nobody waits for this sample any more: free its sequences; it settles as cancelled."""

    type: Literal["abort"] = "abort"
    rid: str


class StreamChunk(_Message):
    """Tokens of one sequence of a running sample, from position `offset`. A sample that runs again sends them again, and the same ones."""

    type: Literal["chunk"] = "chunk"
    rid: str
    sequence: int
    offset: int
    tokens: list[int]
    logprobs: list[float]


Message = DrainOrder | SampleAbort | StreamChunk

_ANY: TypeAdapter[Message] = TypeAdapter(Annotated[Message, Field(discriminator="type")])


def encode(message: Message) -> str:
    return message.model_dump_json()


def decode(text: str) -> Message:
    return _ANY.validate_json(text)
