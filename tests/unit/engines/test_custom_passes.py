"""A pass with a custom loss through the engines: the gradient that it adds, what it reports, and what a refused one leaves."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from tests.unit.engines.datums import array, compute, datum, ints, supervised, tensor
from tests.unit.engines.peft import computed, refused, state
from tests.unit.engines.traced import call, loss_of, ref, traced
from tinsmith.engines.base import Contents
from tinsmith.engines.fake import FakeTrainingEngine
from tinsmith.engines.peft_engine import PeftEngine
from tinsmith.engines.snapshot import read
from tinsmith.protocol.capabilities import TRAINING_ENGINES
from tinsmith.protocol.errors import ValidationFailed
from tinsmith.protocol.inputs import Datum
from tinsmith.protocol.tensors import Tensor
from tinsmith.protocol.training import Compute, ComputeOutput, LoraConfig

LORA = LoraConfig(rank=8, seed=11)


def weighted_squares(logprobs, weights):
    loss = (weights * logprobs**2).sum()
    return loss, {"custom/squares:sum": loss, "custom/best:mean": logprobs.max()}


def data(num_targets: int | None = None) -> list[Datum]:
    rng = np.random.default_rng(3)
    return [supervised(rng, length, num_targets=num_targets) for length in (5, 31, 12, 1)]


def custom(datums: list[Datum], *, backward: bool = True, rank: int = 1) -> Compute:
    loss = traced(weighted_squares, logprobs=rank, weights=rank)
    return Compute(tuple(datums), "custom", {}, backward=backward, custom_loss=loss)


def grad(engine: PeftEngine, model_id: str) -> torch.Tensor:
    found = read(engine.capture(model_id, Contents.SNAPSHOT), engine._adapters[model_id].layout, optimizer=True).grad_P
    assert found is not None
    return found


def values(output: ComputeOutput) -> list[torch.Tensor]:
    return [torch.from_numpy(array(logprobs).copy()) for logprobs in output.logprobs]


def client_side(engine: PeftEngine, datums: list[Datum]) -> tuple[float, dict[str, float]]:
    """The loss in the client: a forward pass, its derivative there, and a backward pass with it as weights. Answers loss and metrics."""
    forward = values(computed(engine, "client", compute(datums, backward=False)))
    total, metrics, surrogate = 0.0, {"custom/squares:sum": 0.0, "custom/best:mean": 0.0}, []
    for one, logprobs in zip(datums, forward, strict=True):
        leaf = logprobs.requires_grad_()
        loss, told = weighted_squares(leaf, torch.from_numpy(array(one.loss_fn_inputs["weights"]).copy()))
        loss.backward()
        total += float(loss.detach())
        metrics["custom/squares:sum"] += float(told["custom/squares:sum"].detach())
        metrics["custom/best:mean"] += float(told["custom/best:mean"].detach()) / len(datums)
        weights = tensor(-leaf.grad.numpy())
        surrogate.append(replace(one, loss_fn_inputs={"target_tokens": one.loss_fn_inputs["target_tokens"], "weights": weights}))
    computed(engine, "client", compute(surrogate))
    return total, metrics


@pytest.mark.parametrize("num_targets", [None, 3])
def test_the_gradient_is_that_of_the_client_side_path(peft: PeftEngine, num_targets):
    for model_id in ("server", "client"):
        peft.create_adapter(model_id, LORA)
    output = computed(peft, "server", custom(data(num_targets), rank=1 if num_targets is None else 2))
    total, metrics = client_side(peft, data(num_targets))
    assert output.metrics.pop("loss:sum") == pytest.approx(total, rel=1e-6)
    assert output.metrics == pytest.approx(metrics, rel=1e-6)
    torch.testing.assert_close(grad(peft, "server"), grad(peft, "client"), rtol=1e-5, atol=1e-7)
    assert [one.shape for one in output.logprobs] == [one.loss_fn_inputs["target_tokens"].shape for one in data(num_targets)]


def test_a_forward_pass_reports_the_same_and_leaves_nothing(peft: PeftEngine):
    peft.create_adapter("m", LORA)
    before = state(peft, "m")
    forward = computed(peft, "m", custom(data(), backward=False))
    assert state(peft, "m") == before
    assert computed(peft, "m", custom(data())) == forward


def test_scalars_and_whole_numbers_reach_the_loss_as_they_were_sent(peft: PeftEngine):
    def stepped(logprobs, beta, steps, target_tokens):
        return beta * (logprobs * (steps // 2)).sum(), {"custom/targets:sum": target_tokens.sum(), "custom/steps:sum": steps.sum() // 2}

    peft.create_adapter("m", LORA)
    loss = traced(stepped, beta=0)
    one = datum([1, 2, 3], target_tokens=ints([4, 5, 6]), beta=tensor([0.5]), steps=ints([1, 2, 6]), unread=tensor([1, 2, 3]))
    output = computed(peft, "m", Compute((one,), "custom", {}, backward=True, custom_loss=loss))
    (logprobs,) = values(output)
    assert output.metrics["loss:sum"] == pytest.approx(0.5 * float(logprobs[1] + 3 * logprobs[2]), rel=1e-6)
    assert (output.metrics["custom/targets:sum"], output.metrics["custom/steps:sum"]) == (15.0, 4.0)


LOG = ref("logprobs")
TOTAL = call("call_method", "total", "sum", LOG)
INFINITE = [call("call_method", "sum_0", "sum", LOG), call("call_function", "total", "operator.truediv", ref("sum_0"), 0.0)]


@pytest.mark.parametrize(
    ("loss", "inputs", "names"),
    [
        (loss_of(call("call_function", "x", "torch.load", LOG), TOTAL), {}, "torch.load"),
        (loss_of(call("call_method", "x", "expand", LOG, 1 << 40, -1), TOTAL), {}, "bound"),
        (loss_of(TOTAL, inputs=("logprobs", "mask")), {}, "mask"),
        (loss_of(TOTAL, inputs=("logprobs", "mask")), {"mask": tensor([1, np.nan, 1])}, "NaN"),
        (loss_of(TOTAL), {"target_tokens": ints([1, 2, 60_000])}, "token ids"),
        (loss_of(*INFINITE), {}, "not finite"),
    ],
)
def test_a_refused_loss_leaves_the_adapter_as_it_was(peft: PeftEngine, loss, inputs: dict[str, Tensor], names):
    peft.create_adapter("m", LORA)
    computed(peft, "m", custom(data()))
    before = state(peft, "m")
    one = datum([1, 2, 3], **({"target_tokens": ints([1, 2, 3])} | inputs))
    refusal = refused(peft, "m", Compute((one,), "custom", {}, backward=True, custom_loss=loss))
    assert isinstance(refusal, ValidationFailed)
    assert names in refusal.message
    assert state(peft, "m") == before


def test_the_name_alone_is_no_loss(peft: PeftEngine):
    peft.create_adapter("m", LORA)
    assert "not implemented" in refused(peft, "m", compute(data(), "custom")).message


def test_the_table_of_engines_tells_which_runs_them():
    assert {name for name, engine in TRAINING_ENGINES.items() if engine.has_custom_losses} == {"peft"}
    fake = FakeTrainingEngine(vocab_size=60_000, max_context=64)
    fake.create_adapter("m", LORA)
    assert "not implemented by this engine" in refused(fake, "m", custom(data())).message
