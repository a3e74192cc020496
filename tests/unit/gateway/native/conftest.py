"""A gateway in this process, over memory."""

from collections.abc import AsyncIterator

import pytest

from tests.fakes.face import Face, open_face


@pytest.fixture
async def face() -> AsyncIterator[Face]:
    async with open_face() as opened:
        yield opened
