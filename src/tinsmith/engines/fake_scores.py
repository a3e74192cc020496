"""What the deterministic sampling engine tells of a prompt, by the rule of `fake_model.py`."""

from array import array
from itertools import pairwise

from tinsmith.engines.fake_model import Vector, candidates, draw, logprob
from tinsmith.protocol.sample_checks import NO_TARGET
from tinsmith.protocol.sampling import PromptAltTokens, Sample, SampleOutput, TopRow
from tinsmith.protocol.tensors import DType, Tensor, int64_values


def prompt_scores(sample: Sample, b: Vector, vocab_size: int) -> SampleOutput:
    """An answer without sequences."""
    tokens, last_n = sample.prompt.tokens, sample.prompt_logprobs_last_n
    first = 1 if last_n is None else len(tokens) - last_n
    prompt: list[float | None] | None = None
    best: list[TopRow | None] | None = None
    if sample.prompt_logprobs:
        prompt = [None, *(logprob(b, previous, token) for previous, token in pairwise(tokens))]
        prompt[:first] = [None] * first
    if sample.topk_prompt_logprobs > 0:
        k = sample.topk_prompt_logprobs
        best = [None, *(candidates(b, previous, vocab_size)[:k] for previous in tokens[:-1])]
        best[:first] = [None] * first
    targets = None if sample.target_prompt_logprobs is None else _target_logprobs(sample.target_prompt_logprobs, tokens, b)
    alternatives = _alternatives(sample, tokens, b, vocab_size) if sample.prompt_alt_tokens_k > 0 else None
    return SampleOutput([], prompt, best, targets, alternatives)


def _target_logprobs(targets: Tensor, tokens: list[int], b: Vector) -> Tensor:
    ids = int64_values(targets.data)
    ends = list(range(0, len(ids) + 1, targets.shape[1])) if targets.csr is None else int64_values(targets.csr.crow).tolist()
    values = array("f")
    for previous, (start, end) in zip(tokens, pairwise(ends), strict=False):
        values.extend(0.0 if token == NO_TARGET else logprob(b, previous, token) for token in ids[start:end])
    return Tensor(DType.FLOAT32, targets.shape, values.tobytes(), targets.csr)


def _alternatives(sample: Sample, tokens: list[int], b: Vector, vocab_size: int) -> PromptAltTokens:
    drawn: TopRow = []
    for position, previous in enumerate(tokens[:-1], 1):
        ranked = candidates(b, previous, vocab_size)
        is_greedy = sample.params.temperature == 0
        for index in range(sample.prompt_alt_tokens_k):
            drawn.append(ranked[0] if is_greedy else draw(ranked, f"{sample.params.seed}/prompt/{position}/{index}"))
    shape = (len(tokens) - 1, sample.prompt_alt_tokens_k)
    return PromptAltTokens(
        Tensor(DType.INT64, shape, array("q", (token for token, _ in drawn)).tobytes()),
        Tensor(DType.FLOAT32, shape, array("f", (value for _, value in drawn)).tobytes()),
    )
