"""What of a sample is refused before anything runs: scores of positions that are not there, foreign token ids, answers out of bounds.

A function of the command and the limits of its base model. Both a gateway and an engine ask it.
"""

from bisect import bisect_right

from tinsmith.protocol.errors import ValidationFailed
from tinsmith.protocol.loss_checks import Limits, check_ids, check_input
from tinsmith.protocol.sampling import Sample
from tinsmith.protocol.tensors import DType, Tensor, int64_values

NO_TARGET = -1  # the id of a cell that asks for nothing
MAX_CELLS = 2**20  # of one table of an answer: 12 MiB at the 12 bytes of a token and its log-prob


def check_sample(sample: Sample, limits: Limits) -> None:
    """Raises ValidationFailed, InputTokensExceeded, naming the field and the remedy.

    max_tokens may be more than the context has room for: the sample then ends where the context does.
    """
    check_input(sample.prompt, "prompt", limits)
    check_asked(sample, limits)


def check_asked(sample: Sample, limits: Limits) -> None:
    """What is asked of a prompt that has passed. Raises ValidationFailed."""
    num_prompt = len(sample.prompt)
    room = max(1, limits.max_context - num_prompt)
    num_new = room if sample.params.max_tokens is None else min(sample.params.max_tokens, room)
    _check_cells("topk_prompt_logprobs", num_prompt * sample.topk_prompt_logprobs)
    _check_cells("prompt_alt_tokens_k", num_prompt * sample.prompt_alt_tokens_k)
    _check_cells("topk_sample_logprobs", sample.num_samples * num_new * sample.topk_sample_logprobs)
    if sample.prompt_logprobs_last_n is not None:
        _check_last_n(sample.prompt_logprobs_last_n, num_prompt, is_scored=sample.prompt_logprobs)
    if sample.target_prompt_logprobs is not None:
        _check_targets(sample.target_prompt_logprobs, num_prompt, limits.vocab_size)
    if sample.params.logit_bias:
        check_ids("logit_bias", min(sample.params.logit_bias), max(sample.params.logit_bias), limits.vocab_size)


def scored_from(sample: Sample) -> int:
    """The first row of the prompt's logits that is asked for, of a sample that has passed; row t scores position t + 1. The number of rows,
    where none is asked for."""
    num_rows = len(sample.prompt) - 1
    if sample.prompt_alt_tokens_k > 0:
        return 0
    firsts = [num_rows]
    if sample.prompt_logprobs or sample.topk_prompt_logprobs > 0:
        firsts.append(0 if sample.prompt_logprobs_last_n is None else num_rows - sample.prompt_logprobs_last_n)
    if sample.target_prompt_logprobs is not None:
        firsts.append(first_target_row(sample.target_prompt_logprobs))
    return min(firsts)


def first_target_row(targets: Tensor) -> int:
    """The first row that names a token, of targets that have passed."""
    cell = next(cell for cell, token in enumerate(int64_values(targets.data)) if token != NO_TARGET)
    if targets.csr is None:
        return cell // targets.shape[1]
    return bisect_right(int64_values(targets.csr.crow), cell) - 1


def _check_cells(field: str, num_cells: int) -> None:
    if num_cells > MAX_CELLS:
        raise ValidationFailed(f"{field}: the answer would have {num_cells} cells, the bound is {MAX_CELLS}; ask for fewer, or in parts")


def _check_last_n(last_n: int, num_prompt: int, *, is_scored: bool) -> None:
    if not is_scored:
        raise ValidationFailed("prompt_logprobs_last_n: applies to prompt log-probs; set prompt_logprobs, or leave it out")
    if not 1 <= last_n < num_prompt:
        raise ValidationFailed(
            f"prompt_logprobs_last_n: {last_n} of a prompt of {num_prompt} tokens; send 1 to {num_prompt - 1}, or leave it out"
        )


def _check_targets(targets: Tensor, num_prompt: int, vocab_size: int) -> None:
    field = "target_prompt_logprobs"
    if targets.dtype is not DType.INT64:
        raise ValidationFailed(f"{field}: dtype {targets.dtype}; send token ids as int64")
    if len(targets.shape) != 2 or targets.shape[0] != num_prompt - 1:
        raise ValidationFailed(f"{field}: shape {list(targets.shape)} for a prompt of {num_prompt} tokens; send [{num_prompt - 1}, K]")
    ids = int64_values(targets.data)
    _check_cells(field, len(ids))
    if max(ids, default=NO_TARGET) == NO_TARGET:
        raise ValidationFailed(f"{field}: names no token; send at least one id, or leave it out")
    if min(ids) < NO_TARGET or max(ids) >= vocab_size:
        raise ValidationFailed(
            f"{field}: ids must lie in [0, {vocab_size}), or be {NO_TARGET} in cells that ask for nothing, got {min(ids)} to {max(ids)}"
        )
