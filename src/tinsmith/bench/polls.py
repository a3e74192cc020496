"""Many HTTP requests that wait, from one process: a plain client on asyncio streams, so that its own cost stays small and equal for both
rivals. Speaks as much HTTP/1.1 as a JSON POST needs."""

import asyncio
import json
import time
from dataclasses import dataclass
from urllib.parse import urlsplit


@dataclass(eq=False, slots=True)
class Poll:
    """A request that was sent. `answered_at`: when its answer began to arrive (time.monotonic, s), None until then."""

    reader: asyncio.StreamReader
    writer: asyncio.StreamWriter
    answered_at: float | None = None
    status: int | None = None

    async def answer(self) -> float:
        """Wait for it; answers `answered_at`."""
        line = await self.reader.readline()
        self.answered_at = time.monotonic()
        self.status = int(line.split()[1])
        self.writer.close()
        return self.answered_at


async def post(url: str, path: str, body: object) -> Poll:
    """Send a request on a connection of its own and do not wait for the answer."""
    parts = urlsplit(url)
    reader, writer = await asyncio.open_connection(parts.hostname, parts.port)
    content = json.dumps(body).encode()
    writer.write(
        f"POST {path} HTTP/1.1\r\nHost: {parts.netloc}\r\nContent-Type: application/json\r\n"
        f"Content-Length: {len(content)}\r\nConnection: close\r\n\r\n".encode()
        + content
    )
    await writer.drain()
    return Poll(reader, writer)
