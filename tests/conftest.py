"""Fixtures that every level of the suite shares."""

import pytest

from tests import model_cache
from tinsmith.protocol.sessions import BaseModelInfo


@pytest.fixture(scope="session")
def tiny_model() -> BaseModelInfo:
    return model_cache.tiny_model()
