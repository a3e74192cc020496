"""A gateway with a real tokenizer and a living sampler, which a test plays."""

from collections.abc import AsyncIterator

import pytest

from tests.fakes.face import BASE, open_face
from tests.unit.gateway.native.bodies import tiny
from tests.unit.gateway.openai.scene import SAMPLER, Scene, texts_of
from tinsmith.protocol.sessions import BaseModelInfo
from tinsmith.state.lanes import work_topic


@pytest.fixture
async def scene(tiny_model: BaseModelInfo) -> AsyncIterator[Scene]:
    async with open_face(base=tiny(tiny_model)) as face:
        await face.lanes.renew(SAMPLER)
        face.services.renderers._read[BASE] = texts_of(tiny_model.path)
        yield Scene(face, await face.lanes.tail([work_topic(SAMPLER.base)]))
