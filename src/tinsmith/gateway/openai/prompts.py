"""From a request under /v1 to the samples that it asks for: bounds of text, tokens, the options of sampling. Everything that can be refused
is refused here, before anything is queued."""

from array import array
from collections.abc import Sequence
from dataclasses import dataclass

from starlette.requests import Request

from tinsmith.gateway.deps import Services
from tinsmith.gateway.openai import tools
from tinsmith.gateway.openai.bodies import DEFAULT_MAX_TOKENS, ChatBody, CompletionBody, MessageBody, SamplingBody
from tinsmith.gateway.openai.served import ServedModel
from tinsmith.gateway.preflight import check_sample
from tinsmith.protocol.errors import InputTokensExceeded, PayloadTooLarge, ValidationFailed
from tinsmith.protocol.inputs import ModelInput, TextChunk
from tinsmith.protocol.native import MAX_CHARACTERS, MAX_RENDERED
from tinsmith.protocol.sampling import Sample, SamplingParams
from tinsmith.protocol.sessions import BaseModelInfo
from tinsmith.text.conversations import Conversations, rendered_characters

_NO_SEED = 0  # until the sample is queued
_PARTS = "\n"  # between the text parts of one content


@dataclass(frozen=True, slots=True)
class Asked:
    """A request that may be queued: one sample a prompt."""

    served: ServedModel
    texts: Conversations
    prompts: list[list[int]]
    samples: list[Sample]


async def asked_completions(request: Request, services: Services, body: CompletionBody, served: ServedModel) -> Asked:
    """Raises ValidationFailed, InputTokensExceeded, PayloadTooLarge; ClientDisconnect as `Renderers.run` does."""
    texts = await services.renderers.need(served.base, "model")
    given = _prompts(body)
    for text in given:
        if isinstance(text, str):
            _check_characters("prompt", len(text), served.base, texts)
    _check_total("prompt", sum(len(text) for text in given if isinstance(text, str)))

    def encode() -> list[list[int]]:
        return [texts.encode(prompt, add_special_tokens=body.add_special_tokens) if isinstance(prompt, str) else prompt for prompt in given]

    return _asked(body, served, texts, await services.renderers.run(request, encode), "prompt")


async def asked_chat(request: Request, services: Services, body: ChatBody, served: ServedModel) -> Asked:
    """Raises as `asked_completions`."""
    texts = await services.renderers.need(served.base, "model")
    messages = [_message(message, index, served.base) for index, message in enumerate(body.messages)]
    signatures = [tools.signature(tool) for tool in body.offered]
    _check_conversation(messages, signatures, served.base, texts)
    prompt = await services.renderers.run(request, lambda: texts.prompt(messages, signatures))
    return _asked(body, served, texts, [prompt], "messages")


def _asked(body: CompletionBody | ChatBody, served: ServedModel, texts: Conversations, prompts: list[list[int]], field: str) -> Asked:
    samples = [_sample(body, served, prompt, field) for prompt in prompts]
    return Asked(served, texts, prompts, samples)


def _sample(body: CompletionBody | ChatBody, served: ServedModel, prompt: Sequence[int], field: str) -> Sample:
    base = served.base
    if len(prompt) > base.max_context:
        raise InputTokensExceeded(f"{field}: {len(prompt)} tokens exceed the context of {base.max_context}; shorten it")
    sample = Sample(
        prompt=ModelInput((TextChunk(array("i", prompt).tobytes()),)),
        params=_params(body, room=base.max_context - len(prompt)),
        num_samples=body.n,
        adapter=None if served.checkpoint is None else served.checkpoint.artifact,
        topk_sample_logprobs=_num_tops(body),
    )
    try:
        check_sample(sample, base)
    except (ValidationFailed, InputTokensExceeded) as error:
        raise type(error)(_renamed(error.message, {"prompt": field, "topk_sample_logprobs": _tops_field(body)})) from error
    bound = body.token_bound
    if bound is not None and len(prompt) + bound > base.max_context:
        raise InputTokensExceeded(
            f"{field}: {len(prompt)} tokens and up to {bound} more exceed the context of {base.max_context}; send a shorter prompt, "
            "or ask for fewer"
        )
    return sample


def _params(body: SamplingBody, *, room: int) -> SamplingParams:
    bound = body.token_bound
    if bound is None and isinstance(body, CompletionBody):
        bound = max(1, min(DEFAULT_MAX_TOKENS, room))
    return SamplingParams(
        seed=_NO_SEED,
        max_tokens=bound,
        temperature=body.temperature,
        top_k=body.top_k,
        top_p=body.top_p,
        stop=body.stops if body.stops else None,
        frequency_penalty=body.frequency_penalty,
        presence_penalty=body.presence_penalty,
        logit_bias={int(token): bias for token, bias in body.logit_bias.items()},
    )


def _num_tops(body: CompletionBody | ChatBody) -> int:
    """How many alternatives each sampled token is told with."""
    if isinstance(body, ChatBody):
        return body.top_logprobs
    return 0 if body.logprobs is None else body.logprobs


def _tops_field(body: SamplingBody) -> str:
    return "top_logprobs" if isinstance(body, ChatBody) else "logprobs"


def _renamed(message: str, fields: dict[str, str]) -> str:
    """The field as this face calls it."""
    field, colon, rest = message.partition(":")
    return f"{fields.get(field, field)}{colon}{rest}"


def _prompts(body: CompletionBody) -> list[str | list[int]]:
    """One or several, whatever the form."""
    if isinstance(body.prompt, str):
        return [body.prompt]
    tokens = [part for part in body.prompt if isinstance(part, int)]
    return [tokens] if tokens else [part for part in body.prompt if not isinstance(part, int)]


def _message(message: MessageBody, index: int, base: BaseModelInfo) -> dict[str, object]:
    """As a chat template reads it. Raises ValidationFailed."""
    field = f"messages[{index}]"
    if message.content is None and not message.tool_calls:
        raise ValidationFailed(f"{field}.content: missing; send a text")
    told: dict[str, object] = {
        "role": "system" if message.role == "developer" else message.role,
        "content": _content(message, field, base),
    }
    if message.tool_calls:
        if message.role != "assistant":
            raise ValidationFailed(f"{field}.tool_calls: only the assistant calls tools; leave it out")
        told["tool_calls"] = [tools.former_call(call, f"{field}.tool_calls[{at}]") for at, call in enumerate(message.tool_calls)]
    named = {"name": message.name, "tool_call_id": message.tool_call_id}
    return told | {key: value for key, value in named.items() if value is not None}


def _content(message: MessageBody, field: str, base: BaseModelInfo) -> str:
    if message.content is None or isinstance(message.content, str):
        return "" if message.content is None else message.content
    texts: list[str] = []
    for at, part in enumerate(message.content):
        if part.type != "text":
            raise ValidationFailed(
                f"{field}.content[{at}]: a part of type {part.type[:40]!r}; base model {base.name} has no processor for it here, send text"
            )
        if part.text is None:
            raise ValidationFailed(f"{field}.content[{at}].text: missing; send the text")
        texts.append(part.text)
    return _PARTS.join(texts)


def _check_conversation(
    messages: Sequence[dict[str, object]], signatures: Sequence[dict[str, object]], base: BaseModelInfo, texts: Conversations
) -> None:
    """Before a template sees any of it: rendering grows with the square of the turns. Raises PayloadTooLarge, InputTokensExceeded."""
    sizes = [(str(message["role"]), _size(message)) for message in messages]
    told = [("system", _size(signatures)), *sizes] if signatures else sizes
    total = sum(size for _, size in told)
    _check_total("messages", total)
    _check_characters("messages", total, base, texts)
    rendered = rendered_characters(told)
    if rendered > MAX_RENDERED:
        raise PayloadTooLarge(f"messages: rendering takes {rendered} characters, the bound is {MAX_RENDERED}; shorten the conversation")


def _size(tree: object) -> int:
    """Characters of the texts in it."""
    match tree:
        case str():
            return len(tree)
        case dict():
            return sum(len(str(key)) + _size(part) for key, part in tree.items())
        case list():
            return sum(map(_size, tree))
        case _:
            return 0


def _check_total(field: str, size: int) -> None:
    if size > MAX_CHARACTERS:
        raise PayloadTooLarge(f"{field}: {size} characters, the bound is {MAX_CHARACTERS}; shorten it")


def _check_characters(field: str, size: int, base: BaseModelInfo, texts: Conversations) -> None:
    bound = texts.max_characters(base.max_context)
    if size > bound:
        raise InputTokensExceeded(f"{field}: {size} characters, a context of {base.max_context} tokens holds at most {bound}; shorten it")
