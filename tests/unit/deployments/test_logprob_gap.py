"""Sampler minus trainer, over the rows that count."""

import struct

import pytest

from tests.fakes.training import int64, model_input, optim, train
from tinsmith import telemetry
from tinsmith.deployments.logprob_gap import logprob_gap, report_gaps
from tinsmith.engines.base import Job
from tinsmith.protocol.errors import ValidationFailed
from tinsmith.protocol.inputs import Datum
from tinsmith.protocol.tensors import DType, Tensor
from tinsmith.protocol.training import Compute, ComputeOutput, OptimOutput, TrainStep


def float32(*values: float) -> Tensor:
    return Tensor(DType.FLOAT32, (len(values),), struct.pack(f"<{len(values)}f", *values))


def datum(sampled: Tensor, advantages: Tensor) -> Datum:
    inputs = {"target_tokens": int64(*range(len(sampled.data) // 4)), "logprobs": sampled, "advantages": advantages}
    return Datum(model_input(*range(len(sampled.data) // 4)), inputs)


def test_the_gap_is_the_mean_over_the_rows_with_an_advantage() -> None:
    data = (datum(float32(0.0, -1.0, -2.0), float32(0.0, 1.0, -1.0)), datum(float32(-3.0), float32(0.5)))
    command = Compute(data, "importance_sampling", {}, backward=True)
    answer = ComputeOutput((float32(-9.0, -1.5, -2.0), float32(-2.0)), {})
    assert logprob_gap(command, answer) == pytest.approx((0.5 + 0.0 - 1.0) / 3)


def test_other_losses_empty_advantages_and_evaluations_have_none() -> None:
    assert logprob_gap(train(1, 2), ComputeOutput((float32(-1.0, -1.0),), {})) is None
    command = Compute((datum(float32(-1.0), float32(0.0)),), "importance_sampling", {}, backward=True)
    assert logprob_gap(command, ComputeOutput((float32(-1.0),), {})) is None
    assert logprob_gap(command, ComputeOutput((), {})) is None


@pytest.mark.parametrize("is_fused", [False, True])
def test_each_command_that_has_a_gap_reports_it(is_fused: bool) -> None:
    compute = Compute((datum(float32(-1.0), float32(1.0)),), "importance_sampling", {}, backward=True)
    command = TrainStep(compute, optim()) if is_fused else compute
    jobs = [Job("lane", 1, command), Job("lane", 2, optim()), Job("lane", 3, compute), Job("lane", 4, train(1))]
    answers = [ComputeOutput((float32(-1.25),), {}), OptimOutput({}), ValidationFailed("refused"), ComputeOutput((float32(-1.0),), {})]
    found: list[telemetry.Measurement] = []
    with telemetry.recording(found.append):
        report_gaps("base", jobs, answers)
    assert [(one.name, one.value, dict(one.labels)) for one in found] == [(telemetry.LOGPROB_GAP, 0.25, {"base_model": "base"})]
