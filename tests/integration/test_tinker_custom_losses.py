"""Custom losses of the stock SDK, in the client and on the server: the same numbers, of the real engine on the tiny model."""

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import tinker
import torch
from tinker import types

from tests.fakes import in_process
from tests.fakes.in_process import BASE, serve
from tinsmith.engines.peft_engine import PeftEngine
from tinsmith.protocol.sessions import BaseModelInfo

RESULT_S = 60

# The SDK leaves connections open when its clients are closed; whoever is collecting garbage then hears of it.
pytestmark = pytest.mark.filterwarnings("ignore:unclosed:ResourceWarning")


def clipped(logprobs, old, advantages, beta):
    """A policy loss with a penalty, whose strength is a scalar of the datum."""
    ratio = torch.exp(logprobs - old)
    terms = torch.minimum(ratio * advantages, torch.clamp(ratio, 0.8, 1.2) * advantages)
    penalty = beta * (logprobs - old).square().sum()
    loss = penalty - torch.where(advantages != 0, terms, 0.0).sum()
    return loss, {"custom/penalty:mean": penalty, "custom/ratio:sum": ratio.mean()}


RANKS = {"logprobs": 1, "old": 1, "advantages": 1, "beta": 0}


def data() -> list[types.Datum]:
    rng = np.random.default_rng(5)
    datums = []
    for length in (4, 9, 6):
        tokens = rng.integers(3, 40, length + 1)
        inputs = {
            "target_tokens": tokens[1:],
            "old": (-10.8 + 0.1 * rng.normal(size=length)).astype(np.float32),
            "advantages": rng.normal(size=length).astype(np.float32),
            "beta": types.TensorData(data=[0.25], dtype="float32", shape=[]),
        }
        datums.append(types.Datum(model_input=types.ModelInput.from_ints(tokens[:-1].tolist()), loss_fn_inputs=inputs))
    return datums


def supervised() -> list[types.Datum]:
    return [
        types.Datum(model_input=one.model_input, loss_fn_inputs={"target_tokens": one.loss_fn_inputs["target_tokens"]}) for one in data()
    ]


@pytest.fixture
def real_engine(tiny_model: BaseModelInfo, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = PeftEngine(tiny_model, "fp32", max_adapters=8, micro_batch_tokens=64)
    monkeypatch.setattr(in_process, "FakeTrainingEngine", lambda **_: engine)


@pytest.fixture(params=[True, False], ids=["server", "client"])
def service(request: pytest.FixtureRequest, real_engine: None, tmp_path_factory: pytest.TempPathFactory) -> Iterator[tinker.ServiceClient]:
    with serve(tmp_path_factory.mktemp("artifacts"), gateway={"custom_losses": request.param}) as server:
        client = tinker.ServiceClient(base_url=server.url, api_key="tml-test")
        yield client
        client.close("success").result()


def trainer(service: tinker.ServiceClient) -> tinker.TrainingClient:
    return service.create_lora_training_client(BASE, rank=8, seed=3).result(RESULT_S)


STEP = types.AdamParams(learning_rate=1e-3, eps=1e-6)


def in_the_client(client: tinker.TrainingClient) -> dict[str, float]:
    def whole(datums, logprobs_list):
        total, metrics = 0.0, {"custom/penalty:mean": 0.0, "custom/ratio:sum": 0.0}
        for one, logprobs in zip(datums, logprobs_list, strict=True):
            loss, told = clipped(logprobs, *(one.loss_fn_inputs[name].to_torch() for name in ("old", "advantages", "beta")))
            total = total + loss
            metrics["custom/penalty:mean"] += float(told["custom/penalty:mean"].detach()) / len(datums)
            metrics["custom/ratio:sum"] += float(told["custom/ratio:sum"].detach())
        return total, metrics

    return dict(client.forward_backward_custom(data(), whole).result(RESULT_S).metrics)


def test_a_traced_loss_equals_the_same_function_in_the_client(service: tinker.ServiceClient):
    handle = service.create_custom_loss(clipped, input_ranks=RANKS).result(RESULT_S)
    assert (handle.loss_id is not None) is service.holder.get_client_config().custom_loss_server_side
    traced, native = trainer(service), trainer(service)
    output = traced.forward_backward_custom(data(), handle).result(RESULT_S)
    expected = in_the_client(native)
    for key in ("loss:sum", "custom/penalty:mean", "custom/ratio:sum"):
        assert output.metrics[key] == pytest.approx(expected[key], rel=1e-5)
    norms = [client.optim_step(STEP).result(RESULT_S).metrics["unclipped_grad_l2:mean"] for client in (traced, native)]
    assert norms[0] == pytest.approx(norms[1], rel=1e-5)
    after = [client.forward(supervised(), "cross_entropy").result(RESULT_S).loss_fn_outputs for client in (traced, native)]
    for one, other in zip(*after, strict=True):
        np.testing.assert_allclose(one["logprobs"].to_numpy(), other["logprobs"].to_numpy(), rtol=1e-5)


def test_a_loss_that_the_server_does_not_run_is_told_to_its_author(real_engine: None, tmp_path: Path):
    def sorted_loss(logprobs):
        return torch.sort(logprobs).values[:2].sum(), {}

    with serve(tmp_path, gateway={"custom_losses": True}) as server:
        service = tinker.ServiceClient(base_url=server.url, api_key="tml-test")
        with pytest.raises(tinker.UnprocessableEntityError, match=r"torch\.sort"):
            service.create_custom_loss(sorted_loss, input_ranks={"logprobs": 1}).result(RESULT_S)
        assert trainer(service).forward(supervised(), "cross_entropy").result(RESULT_S).metrics["loss:sum"] > 0
        service.close("success").result()
