"""Fixtures that every level of the suite shares."""

from collections.abc import Iterator

import pytest

from tests import model_cache
from tests.collecting import collect_quietly
from tinsmith.protocol.sessions import BaseModelInfo


@pytest.fixture(scope="session")
def tiny_model() -> BaseModelInfo:
    return model_cache.tiny_model()


@pytest.fixture(autouse=True, scope="session")
def quiet_sdk() -> Iterator[None]:
    """The SDK sends no telemetry. It leaves connections open when its clients are closed: collected here, where nobody minds."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TINKER_TELEMETRY", "0")
        yield
    collect_quietly()
