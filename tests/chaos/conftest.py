"""What every test of the fault matrix shares."""

import pytest

from tests.chaos.matrix import Matrix


@pytest.fixture(scope="session")
def matrix() -> Matrix:
    return Matrix()
