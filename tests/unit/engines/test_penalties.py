"""What is added to logits, by the definition of OpenAI's API."""

import pytest

from tinsmith.engines.penalties import adjustments
from tinsmith.protocol.sampling import SamplingParams


@pytest.mark.parametrize(
    ("asked", "counts", "added"),
    [
        ({}, {1: 3}, {}),
        ({"frequency_penalty": 0.5}, {1: 3, 2: 1}, {1: -1.5, 2: -0.5}),
        ({"presence_penalty": 0.5}, {1: 3, 2: 1}, {1: -0.5, 2: -0.5}),
        ({"frequency_penalty": 1.0, "presence_penalty": -0.25}, {1: 2}, {1: -1.75}),
        ({"logit_bias": {1: 2.0, 5: -100.0}}, {1: 2}, {1: 2.0, 5: -100.0}),
        ({"logit_bias": {1: 2.0}, "frequency_penalty": 0.5}, {1: 2, 3: 1}, {1: 1.0, 3: -0.5}),
        ({"frequency_penalty": 0.5, "presence_penalty": 0.5}, {}, {}),
    ],
)
def test_the_definition(asked: dict[str, object], counts: dict[int, int], added: dict[int, float]) -> None:
    assert adjustments(SamplingParams.model_validate({"seed": 0} | asked), counts) == added
