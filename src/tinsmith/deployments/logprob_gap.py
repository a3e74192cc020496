"""How far the sampler's log-probs of tokens lie from the trainer's for the same tokens: a measure of how well the two agree.

The losses of policy gradients are sent the sampler's log-probs (input `logprobs`) and answer the trainer's, so on the trainer, where
command and answer meet, the gap costs one subtraction; no engine and no store is asked. After a step on the same samples it also holds how
far the policy has moved.
"""

from collections.abc import Iterator, Sequence

import numpy as np
import numpy.typing as npt

from tinsmith import telemetry
from tinsmith.engines.base import Answer, Job
from tinsmith.protocol.inputs import Datum
from tinsmith.protocol.tensors import DType, Tensor
from tinsmith.protocol.training import Compute, ComputeOutput, TrainStep

Row = npt.NDArray[np.float32]


def report_gaps(base: str, jobs: Sequence[Job], answers: Sequence[Answer]) -> None:
    """Of the commands of one engine call."""
    for job, answer in zip(jobs, answers, strict=True):
        command = job.command.compute if isinstance(job.command, TrainStep) else job.command
        if isinstance(command, Compute) and isinstance(answer, ComputeOutput):
            gap = logprob_gap(command, answer)
            if gap is not None:
                telemetry.observe(telemetry.LOGPROB_GAP, gap, base_model=base)


def logprob_gap(command: Compute, answer: ComputeOutput) -> float | None:
    """Mean of q - l in nats, sampler minus trainer, over the rows whose advantage is not 0; None where there are none."""
    gaps = [gap for gap in _gaps(command, answer) if gap.size]
    return float(np.concatenate(gaps).mean(dtype=np.float64)) if gaps else None


def _gaps(command: Compute, answer: ComputeOutput) -> Iterator[Row]:
    for datum, logprobs in zip(command.data, answer.logprobs, strict=False):  # an evaluation answers none
        sampled, advantages = _rows(datum, "logprobs"), _rows(datum, "advantages")
        if sampled is not None and advantages is not None:
            yield (sampled - _values(logprobs))[advantages != 0]


def _rows(datum: Datum, name: str) -> Row | None:
    tensor = datum.loss_fn_inputs.get(name)
    return None if tensor is None or tensor.csr is not None or tensor.dtype is not DType.FLOAT32 else _values(tensor)


def _values(tensor: Tensor) -> Row:
    return np.frombuffer(tensor.data, np.float32)
