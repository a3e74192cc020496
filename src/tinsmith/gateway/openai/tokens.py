"""Sampled tokens as answers under /v1 tell them: their texts, their log-probs and how many there are."""

from collections.abc import Sequence

from tinsmith.gateway.openai.answers import PromptTokensDetails, TokenLogprob, TopLogprob, Usage, told
from tinsmith.protocol.sampling import SampleOutput, TopRow
from tinsmith.text.tokenizer import Tokenizer

_NO_TEXT = "\ufffd"  # what bytes that are no character decode to


def usage_of(prompts: Sequence[Sequence[int]], outputs: Sequence[SampleOutput]) -> Usage:
    """Exactly what was served: control tokens of the prompt count, and so does the token that ended a sequence."""
    num_prompt = sum(map(len, prompts))
    num_drawn = sum(len(sequence.tokens) for output in outputs for sequence in output.sequences)
    cached = sum(output.prompt_cache_hit_tokens for output in outputs)
    return Usage(
        prompt_tokens=num_prompt,
        completion_tokens=num_drawn,
        total_tokens=num_prompt + num_drawn,
        prompt_tokens_details=PromptTokensDetails(cached_tokens=cached),
    )


def chat_logprob(tokenizer: Tokenizer, token: int, logprob: float, tops: TopRow | None) -> TokenLogprob:
    own = _top(tokenizer, token, logprob)
    rivals = [_top(tokenizer, other, value) for other, value in tops or ()]
    return TokenLogprob(token=own.token, logprob=own.logprob, bytes=own.bytes, top_logprobs=rivals)


def completion_tops(tokenizer: Tokenizer, token: int, logprob: float, tops: TopRow | None) -> dict[str, float]:
    """The alternatives by their texts, and the token that was drawn, whether it is one of them or not. Of several with one text the best
    is told."""
    named = {tokenizer.token_text(token): told(logprob)}
    for other, value in tops or ():
        text = tokenizer.token_text(other)
        named[text] = max(told(value), named.get(text, told(value)))
    return named


def _top(tokenizer: Tokenizer, token: int, logprob: float) -> TopLogprob:
    text = tokenizer.token_text(token)
    return TopLogprob(token=text, logprob=told(logprob), bytes=None if _NO_TEXT in text else list(text.encode()))
