"""The texts of base models in this process: their tokenizers and chat templates, read once each, off the event loop."""

import asyncio

from tinsmith.protocol.errors import ValidationFailed
from tinsmith.protocol.sessions import BaseModelInfo
from tinsmith.text.conversations import Conversations


class Renderers:
    """By base model. One that has no directory, or none with a tokenizer, has no text."""

    def __init__(self) -> None:
        self._read: dict[str, Conversations | None] = {}
        self._reading = asyncio.Lock()

    async def find(self, base: BaseModelInfo) -> Conversations | None:
        """None where the base model has no tokenizer."""
        if base.name not in self._read:
            async with self._reading:
                if base.name not in self._read:
                    self._read[base.name] = await asyncio.to_thread(Conversations.from_dir, base.path) if base.path else None
        return self._read[base.name]

    async def need(self, base: BaseModelInfo, field: str) -> Conversations:
        """Raises ValidationFailed naming the field that cannot be read without a tokenizer."""
        found = await self.find(base)
        if found is None:
            raise ValidationFailed(f"{field}: base model {base.name} has no tokenizer on this server; send token ids")
        return found
