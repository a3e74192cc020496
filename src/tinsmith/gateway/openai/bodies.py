"""The bodies of requests under /v1, closed to unknown fields, and the options of that API which this server does not serve.

A null is an absent field. An option that is documented there and not served here may be sent with the value that means its absence; with
any other it is refused by name. `user` and its kin only label a request for its provider: they are read and dropped. A few fields are no
part of that API: they have the names that other servers of it gave them (`top_k`, `add_special_tokens`, `return_token_ids`).
"""

from collections.abc import Mapping
from typing import Annotated, Literal, TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator
from pydantic_core import ErrorDetails
from starlette.requests import Request

from tinsmith.gateway import bodies
from tinsmith.gateway.auth import JSON, content_type
from tinsmith.protocol import wire_json
from tinsmith.protocol.errors import EndpointUnavailable, InvalidRequest, ValidationFailed
from tinsmith.protocol.futures import one_line
from tinsmith.protocol.native import MAX_SEED, MAX_TURNS
from tinsmith.protocol.sampling import MAX_BIAS, MAX_BIASED, MAX_PENALTY, MAX_STOP_CHARACTERS, MAX_STOPS
from tinsmith.protocol.wire_bounds import MAX_SEQ

MAX_CHOICES = 128  # n, as that API has it
MAX_PROMPTS = 128  # of one completions request; each is a sample of its own in the queue
MAX_TOP_LOGPROBS = 20
MAX_LOGPROBS = 5  # of the older API
MAX_TOOLS = 128
DEFAULT_MAX_TOKENS = 16  # of the older API
_MAX_SHOWN = 3  # faults in one message
_OURS = "Value error, "  # what pydantic puts before a message of our own

AnyOpenAIBody = TypeVar("AnyOpenAIBody", bound="SamplingBody")

# What of the documented options is not served, with the values that ask for nothing.
_UNSERVED: Mapping[str, tuple[object, ...]] = {
    "audio": (),
    "best_of": (1,),
    "echo": (False,),
    "function_call": ("none",),
    "functions": ([],),
    "metadata": ({},),
    "modalities": (["text"],),
    "moderation": (),
    "parallel_tool_calls": (True,),
    "prediction": (),
    "prompt_cache_options": (),
    "prompt_cache_retention": (),
    "reasoning_effort": ("none",),
    "response_format": ({"type": "text"},),
    "service_tier": ("auto", "default"),
    "store": (False,),
    "suffix": ("",),
    "verbosity": (),
    "web_search_options": (),
}
_LABELS = frozenset({"user", "safety_identifier", "prompt_cache_key"})

# Where a field takes several forms, a fault in it is told in one sentence.
_FORMS: Mapping[str, str] = {
    "prompt": f"must be a text, up to {MAX_PROMPTS} texts, a list of token ids, or up to {MAX_PROMPTS} such lists",
    "stop": f"must be a text or a list of up to {MAX_STOPS} texts of 1 to {MAX_STOP_CHARACTERS} characters",
    "content": "must be a text or a list of parts, each with its type",
}


class _Part(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, allow_inf_nan=False, protected_namespaces=())

    @model_validator(mode="before")
    @classmethod
    def _null_is_absent(cls, tree: object) -> object:
        return {key: value for key, value in tree.items() if value is not None} if isinstance(tree, dict) else tree


class StreamOptions(_Part):
    include_usage: bool = False
    include_obfuscation: bool = False  # nothing is padded, whatever it says


Stop = Annotated[str, Field(min_length=1, max_length=MAX_STOP_CHARACTERS)]
Penalty = Annotated[float, Field(ge=-MAX_PENALTY, le=MAX_PENALTY)]
Bias = Annotated[float, Field(ge=-MAX_BIAS, le=MAX_BIAS)]
TokenKey = Annotated[str, Field(pattern=r"^[0-9]{1,9}$")]
TokenId = Annotated[int, Field(ge=0, lt=2**31)]
NumTokens = Annotated[int, Field(ge=1, le=MAX_SEQ)]


class SamplingBody(_Part):
    """What both ways to ask have in common."""

    model: Annotated[str, Field(min_length=1, max_length=1024)]
    stream: bool = False
    stream_options: StreamOptions | None = None
    n: Annotated[int, Field(ge=1, le=MAX_CHOICES)] = 1
    seed: Annotated[int, Field(ge=-MAX_SEED - 1, le=MAX_SEED)] | None = None
    temperature: Annotated[float, Field(ge=0, le=2)] = 1.0
    top_p: Annotated[float, Field(gt=0, le=1)] = 1.0
    top_k: Annotated[int, Field(ge=-1, le=MAX_SEQ)] = -1
    stop: Stop | Annotated[list[Stop], Field(max_length=MAX_STOPS)] | None = None
    max_tokens: NumTokens | None = None
    frequency_penalty: Penalty = 0.0
    presence_penalty: Penalty = 0.0
    logit_bias: Annotated[dict[TokenKey, Bias], Field(max_length=MAX_BIASED)] = {}
    return_token_ids: bool = False

    @property
    def stops(self) -> tuple[str, ...]:
        """None of them: the end-of-sequence token alone stops."""
        return (self.stop,) if isinstance(self.stop, str) else tuple(self.stop or ())

    @property
    def token_bound(self) -> int | None:
        """How many tokens a choice has at most, as far as the request says."""
        return self.max_tokens

    @property
    def includes_usage(self) -> bool:
        return self.stream_options is not None and self.stream_options.include_usage

    @model_validator(mode="after")
    def _streams_where_it_says_how(self) -> "SamplingBody":
        if self.stream_options is not None and not self.stream:
            raise ValueError("stream_options: only for a stream; send stream true, or leave it out")
        return self


class CompletionBody(SamplingBody):
    """POST /v1/completions. `logprobs`: how many alternatives each sampled token is told with."""

    prompt: (
        str
        | Annotated[list[str], Field(min_length=1, max_length=MAX_PROMPTS)]
        | Annotated[list[TokenId], Field(min_length=1)]
        | Annotated[list[list[TokenId]], Field(min_length=1, max_length=MAX_PROMPTS)]
    )
    logprobs: Annotated[int, Field(ge=0, le=MAX_LOGPROBS)] | None = None
    add_special_tokens: bool = True  # of a text: what the tokenizer puts around one, such as the mark of its beginning


class FunctionCallBody(_Part):
    """`arguments`: JSON, as text."""

    name: Annotated[str, Field(min_length=1, max_length=128)]
    arguments: str


class ToolCallBody(_Part):
    id: str
    type: Literal["function"] = "function"
    function: FunctionCallBody


class ContentPart(BaseModel):
    """Only its kind is read here: what else it holds depends on that."""

    model_config = ConfigDict(frozen=True, extra="ignore", strict=True)

    type: str
    text: str | None = None


class MessageBody(_Part):
    role: Literal["developer", "system", "user", "assistant", "tool"]
    content: str | list[ContentPart] | None = None
    name: str | None = None
    refusal: str | None = None
    annotations: list[object] | None = None
    tool_calls: Annotated[list[ToolCallBody], Field(max_length=MAX_TOOLS)] | None = None
    tool_call_id: str | None = None


class FunctionBody(_Part):
    """`parameters`: a JSON schema. It is told to the model, nothing is checked against it."""

    name: Annotated[str, Field(pattern=r"^[A-Za-z0-9_.-]{1,64}$")]
    description: str | None = None
    parameters: dict[str, object] | None = None
    strict: bool = False


class ToolBody(_Part):
    type: Literal["function"]
    function: FunctionBody


class ChatBody(SamplingBody):
    """POST /v1/chat/completions. `max_tokens` is the older name of `max_completion_tokens`."""

    messages: Annotated[list[MessageBody], Field(min_length=1, max_length=MAX_TURNS)]
    max_completion_tokens: NumTokens | None = None
    logprobs: bool = False
    top_logprobs: Annotated[int, Field(ge=0, le=MAX_TOP_LOGPROBS)] = 0
    tools: Annotated[list[ToolBody], Field(max_length=MAX_TOOLS)] = []
    tool_choice: object = None

    @property
    def token_bound(self) -> int | None:
        return self.max_tokens if self.max_completion_tokens is None else self.max_completion_tokens

    @property
    def offered(self) -> list[ToolBody]:
        """The tools that the model is told of."""
        return [] if self.tool_choice == "none" else self.tools

    @model_validator(mode="after")
    def _agrees_with_itself(self) -> "ChatBody":
        if None not in (self.max_tokens, self.max_completion_tokens) and self.max_tokens != self.max_completion_tokens:
            raise ValueError("max_tokens: differs from max_completion_tokens; send one of them")
        if self.top_logprobs > 0 and not self.logprobs:
            raise ValueError("top_logprobs: needs logprobs true")
        return self


async def read(request: Request, kind: type[AnyOpenAIBody]) -> AnyOpenAIBody:
    """Raises PayloadTooLarge, InvalidRequest (no JSON), EndpointUnavailable (an option that is not served), ValidationFailed."""
    media_type = content_type(request.headers)
    if media_type != JSON:
        raise InvalidRequest(f"Content-Type: {media_type[:100]!r} is not accepted here; send {JSON}")
    received = await bodies.receive(request)
    return await bodies.off_loop(lambda: validate(kind, wire_json.parse(received.decoded())), is_large=received.is_large)


def validate(kind: type[AnyOpenAIBody], tree: object) -> AnyOpenAIBody:
    """Raises EndpointUnavailable, ValidationFailed."""
    if not isinstance(tree, dict):
        raise InvalidRequest("body: no JSON object; send one")
    try:
        body = kind.model_validate(_served(kind, tree))
    except ValidationError as error:
        raise ValidationFailed(_described(error)) from error
    if isinstance(body, ChatBody):
        _check_tools(body)
    return body


def _served(kind: type[BaseModel], tree: dict[str, object]) -> dict[str, object]:
    """The request without what asks for nothing. Raises EndpointUnavailable."""
    kept: dict[str, object] = {}
    for name, value in tree.items():
        if value is None or name in _LABELS:
            continue
        if name in kind.model_fields or name not in _UNSERVED:
            kept[name] = value
        elif not any(type(value) is type(neutral) and value == neutral for neutral in _UNSERVED[name]):
            raise EndpointUnavailable(f"{name}: not served here; leave it out")
    return kept


def _check_tools(body: ChatBody) -> None:
    """What no sampler of this server can promise. Raises EndpointUnavailable."""
    if body.tool_choice not in (None, "auto", "none"):
        raise EndpointUnavailable("tool_choice: only 'auto' and 'none' are served: no call can be forced; tell the model to make it")
    for index, tool in enumerate(body.tools):
        if tool.function.strict:
            raise EndpointUnavailable(f"tools[{index}].function.strict: arguments are not held to a schema here; leave it out")


def _described(error: ValidationError) -> str:
    """The first faults in one line, each with its field."""
    lines = list(dict.fromkeys(map(_line, error.errors(include_url=False, include_context=False, include_input=False))))
    hidden = f" (and {len(lines) - _MAX_SHOWN} more)" if len(lines) > _MAX_SHOWN else ""
    return one_line("; ".join(lines[:_MAX_SHOWN]) + hidden)


def _line(fault: ErrorDetails) -> str:
    where: list[str] = []
    for step in fault["loc"]:
        where.append(str(step)[:80])
        if step in _FORMS:
            return f"{'.'.join(where)}: {_FORMS[str(step)]}"
    if fault["type"] == "value_error" and not where:
        return fault["msg"].removeprefix(_OURS)
    message = "no such field; leave it out" if fault["type"] == "extra_forbidden" else fault["msg"]
    return f"{'.'.join(where) or 'body'}: {message}"
