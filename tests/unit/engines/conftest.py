"""A training engine on the tiny model; loading it costs a second a module."""

import pytest

from tinsmith.engines.peft_engine import PeftEngine
from tinsmith.protocol.sessions import BaseModelInfo


@pytest.fixture(scope="module")
def peft(tiny_model: BaseModelInfo) -> PeftEngine:
    return PeftEngine(tiny_model, "fp32", max_adapters=8, micro_batch_tokens=64)
