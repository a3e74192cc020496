"""From logits to a loss and back, on a layer whose logits are its inputs."""

import numpy as np
import pytest
import torch
from torch import nn

from tests.unit.engines.loss_cases import LOSSES, config_of
from tinsmith.engines import unembed
from tinsmith.engines.batch import Example
from tinsmith.engines.lora import ActiveAdapter, LoraLinear, install
from tinsmith.engines.losses import LossTerm

LOGITS = [[1, 2, 0.5, -1], [0, 0, 3, 1], [-1, 0.5, 0.5, 2]]
TARGETS = [1, 2, 0]
LOGPROBS = [-0.49518190, -0.21099762, -3.40282656]
D_LOGITS = [
    [0.24898471, -0.43369798, 0.15101686, 0.03369642],
    [-0.03987542, -0.03987542, 0.18814346, -0.10839262],
    [-0.32309168, 0.04984683, 0.04984683, 0.22339801],
]


@pytest.fixture
def identity() -> LoraLinear:
    model = nn.Module()
    model.lm_head = nn.Linear(4, 4, bias=False)
    nn.init.eye_(model.lm_head.weight)
    install(model, model.lm_head, ActiveAdapter(torch.device("cpu")))
    assert isinstance(model.lm_head, LoraLinear)
    return model.lm_head


def test_the_published_vector_of_logits(identity: LoraLinear) -> None:
    inputs = {
        "target_tokens": torch.tensor(TARGETS),
        "logprobs": torch.tensor([-0.6, -0.2, -3.0]),
        "advantages": torch.tensor([1, -1, 0.5]),
    }
    example = Example(torch.tensor([0, 1, 2]), inputs)

    def loss(_: int, logprobs: torch.Tensor) -> LossTerm:
        return LOSSES["importance_sampling"](logprobs, inputs, config_of("importance_sampling"))

    found = unembed.score(identity, torch.tensor(LOGITS, dtype=torch.float32), [example], loss, backward=True)
    np.testing.assert_allclose(found.logprobs[0].numpy(), LOGPROBS, rtol=1e-5)
    assert found.terms[0].value == pytest.approx(-0.45565998, rel=1e-5)
    assert found.d_hidden_MD is not None
    np.testing.assert_allclose(found.d_hidden_MD.numpy(), D_LOGITS, rtol=1e-5, atol=1e-7)


def test_repeated_targets_of_a_row_add(identity: LoraLinear) -> None:
    logits = torch.tensor(LOGITS[:1], dtype=torch.float32)
    gradients = []
    for targets, weights in (([[1, 1]], [[0.25, 0.5]]), ([[1, 0]], [[0.75, 0.0]])):
        inputs = {"target_tokens": torch.tensor(targets), "weights": torch.tensor(weights)}

        def loss(_: int, logprobs: torch.Tensor, inputs: dict[str, torch.Tensor] = inputs) -> LossTerm:
            return LOSSES["cross_entropy"](logprobs, inputs, {})

        found = unembed.score(identity, logits, [Example(torch.tensor([0]), inputs)], loss, backward=True)
        gradients.append(found.d_hidden_MD)
    assert gradients[0] is not None
    torch.testing.assert_close(gradients[0], gradients[1])
