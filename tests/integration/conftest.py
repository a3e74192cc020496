"""What the tests of several layers share."""

from collections.abc import Iterator

import pytest

from tests.collecting import collect_quietly


@pytest.fixture(autouse=True, scope="module")
def collected() -> Iterator[None]:
    """No module pays for the connections of another."""
    collect_quietly()
    yield
    collect_quietly()
