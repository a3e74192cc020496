"""What a request asks of its prompt's logits, gathered chunk by chunk while the prompt is prefilled.

Row t of the logits stands at position t of the prompt and scores position t + 1, so a prompt of n tokens has n - 1 rows. Rows that nothing
is asked of need no logits: a prefill may skip chunks before the first row that is asked for, and the answer is the same.

Log-probs of the prompt, its alternatives and targets are raw: temperature 1, the full vocabulary. Drawn alternatives: `sampling_rules`.

Shapes: Q rows of a chunk, V vocabulary, K targets a row.
"""

from array import array

import torch
from torch import Tensor

from tinsmith.engines.sampling_rules import LogprobMode, NonFiniteLogits, alternative_uniform, best_of, draw_alternatives
from tinsmith.protocol import tensors
from tinsmith.protocol.sample_checks import NO_TARGET, first_target_row, scored_from
from tinsmith.protocol.sampling import PromptAltTokens, Sample, TopRow
from tinsmith.protocol.tensors import DType, int64_values


class PromptScores:
    """`prompt` has passed `sample_checks`."""

    def __init__(self, sample: Sample, prompt: list[int], vocab_size: int, mode: LogprobMode) -> None:
        self._sample = sample
        self._prompt = prompt
        self._vocab_size = vocab_size
        self._mode = mode
        self._num_rows = len(prompt) - 1
        self._logprobs: list[float | None] = [None] * len(prompt)
        self._best: list[TopRow | None] = [None] * len(prompt)
        self._targets = None if sample.target_prompt_logprobs is None else TargetScores(sample.target_prompt_logprobs)
        self._alt_tokens, self._alt_logprobs = array("q"), array("f")
        self._first_scored = self._num_rows - sample.prompt_logprobs_last_n if sample.prompt_logprobs_last_n is not None else 0
        self.first_row = scored_from(sample)

    def wants(self, start: int, end: int) -> bool:
        """Whether something is asked of a row in [start, end)."""
        return max(start, self.first_row) < min(end, self._num_rows)

    def take(self, start: int, logits_QV: Tensor) -> None:
        """The logits of rows from `start` on, each row once and in order from `first_row` on at the latest. Raises NonFiniteLogits."""
        end = min(start + len(logits_QV), self._num_rows)
        if end <= start:
            return
        if self._asks_raw(end):
            logprobs_QV = torch.log_softmax(logits_QV[: end - start].float(), dim=-1)
            if not bool(torch.isfinite(logprobs_QV.amax(dim=-1)).all()):
                raise NonFiniteLogits("the logits of the prompt are not finite")
            self._take_raw(start, end, logprobs_QV[:, : self._vocab_size])
        if self._sample.prompt_alt_tokens_k > 0:
            for row in range(start, end):
                self._draw_alternatives(row, logits_QV[row - start])

    @property
    def logprobs(self) -> list[float | None] | None:
        return self._logprobs if self._sample.prompt_logprobs else None

    @property
    def best(self) -> list[TopRow | None] | None:
        return self._best if self._sample.topk_prompt_logprobs > 0 else None

    @property
    def target_logprobs(self) -> tensors.Tensor | None:
        return None if self._targets is None else self._targets.tensor()

    @property
    def alt_tokens(self) -> PromptAltTokens | None:
        if self._sample.prompt_alt_tokens_k == 0:
            return None
        shape = (self._num_rows, self._sample.prompt_alt_tokens_k)
        return PromptAltTokens(
            tensors.Tensor(DType.INT64, shape, self._alt_tokens.tobytes()),
            tensors.Tensor(DType.FLOAT32, shape, self._alt_logprobs.tobytes()),
        )

    def _asks_raw(self, end: int) -> bool:
        scores = self._sample.prompt_logprobs or self._sample.topk_prompt_logprobs > 0
        return (scores and self._first_scored < end) or (self._targets is not None and self._targets.first_row < end)

    def _take_raw(self, start: int, end: int, logprobs_QV: Tensor) -> None:
        if self._targets is not None:
            self._targets.take(start, logprobs_QV)
        first = max(start, self._first_scored)
        if first >= end:
            return
        if self._sample.prompt_logprobs:
            chosen = torch.tensor(self._prompt[first + 1 : end + 1], device=logprobs_QV.device)
            self._logprobs[first + 1 : end + 1] = logprobs_QV[first - start :].gather(1, chosen[:, None])[:, 0].tolist()
        if self._sample.topk_prompt_logprobs > 0:
            rows = logprobs_QV[first - start :]
            self._best[first + 1 : end + 1] = [best_of(None, row, self._sample.topk_prompt_logprobs) for row in rows]

    def _draw_alternatives(self, row: int, logits_V: Tensor) -> None:
        params, position = self._sample.params, row + 1
        us = [alternative_uniform(params.seed, position, index) for index in range(self._sample.prompt_alt_tokens_k)]
        drawn = draw_alternatives(logits_V, self._vocab_size, params, us, self._mode)
        self._alt_tokens.extend(draw.token for draw in drawn)
        self._alt_logprobs.extend(draw.logprob for draw in drawn)


class TargetScores:
    """The log-probs of named tokens, row by row. A dense request is read as one that lists every cell."""

    def __init__(self, targets: tensors.Tensor) -> None:
        self._targets = targets
        self._ids = int64_values(targets.data)
        width = targets.shape[1]
        cells = range(0, len(self._ids) + 1, width) if targets.csr is None else int64_values(targets.csr.crow)
        self._ends = list(cells)  # the cells of row t are those from _ends[t] to _ends[t + 1]
        self._values = array("f", bytes(4 * len(self._ids)))
        self.first_row = first_target_row(targets)

    def take(self, start: int, logprobs_QV: Tensor) -> None:
        """Rows from `start` on."""
        end = start + len(logprobs_QV)
        first, last = self._ends[start], self._ends[end]
        if first == last:
            return
        counts = torch.tensor([self._ends[row + 1] - self._ends[row] for row in range(start, end)])
        rows = torch.repeat_interleave(torch.arange(end - start), counts).to(logprobs_QV.device)
        ids = torch.tensor(self._ids[first:last], device=logprobs_QV.device)
        scores = logprobs_QV[rows, ids.clamp(min=0)].masked_fill(ids == NO_TARGET, 0.0)
        self._values[first:last] = array("f", scores.tolist())

    def tensor(self) -> tensors.Tensor:
        return tensors.Tensor(DType.FLOAT32, self._targets.shape, self._values.tobytes(), self._targets.csr)
