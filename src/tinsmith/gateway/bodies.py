"""Reading request bodies: the byte bounds, the encoding and the size at which decoding leaves the event loop, in one place."""

import asyncio
import contextvars
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import TypeVar

from starlette.requests import Request

from tinsmith.protocol import wire, wire_json
from tinsmith.protocol.errors import InvalidRequest, PayloadTooLarge
from tinsmith.protocol.wire_bounds import MAX_WIRE
from tinsmith.protocol.wire_json import AnyBody

HEAD_BYTES = 4096  # kept of a body that is too large: enough for its first fields
DRAIN = 2 * MAX_WIRE  # a caller reads our answer only once it has sent its body, so somewhat more than the bound is read and dropped
_INLINE_BYTES = 64 * 1024  # decoding more than this would hold the loop for over a millisecond

T = TypeVar("T")

_THREADS = ThreadPoolExecutor(4, thread_name_prefix="bodies")  # of the process: what is read here waits for no other work of it


@dataclass(frozen=True, slots=True)
class Received:
    """A body as it travelled; only its beginning where it was over the bound."""

    data: bytes
    is_whole: bool
    encoding: str

    @property
    def is_large(self) -> bool:
        return len(self.data) > _INLINE_BYTES or self.encoding != ""

    def decoded(self) -> bytes:
        """Raises PayloadTooLarge, InvalidRequest."""
        if not self.is_whole:
            raise PayloadTooLarge(f"body: more than {MAX_WIRE} bytes; send the data in smaller chunks")
        if self.encoding in ("", "identity"):
            return self.data
        if self.encoding == "zstd":
            return wire.decompress(self.data)
        raise InvalidRequest(f"Content-Encoding: {self.encoding[:40]!r} is not accepted; send zstd or none")

    def decoded_head(self) -> bytes:
        """The first bytes, whatever is wrong with the rest. Raises InvalidRequest for damaged zstd."""
        if self.encoding == "zstd":
            return wire.decompress_head(self.data, HEAD_BYTES)
        return self.data[:HEAD_BYTES]


async def receive(request: Request) -> Received:
    """Read the body, storing at most the bound."""
    parts: list[bytes] = []
    size = 0
    async for part in request.stream():
        size += len(part)
        if size <= MAX_WIRE:
            parts.append(part)
        elif size > DRAIN:
            break
    encoding = request.headers.get("content-encoding", "").strip().lower()
    return Received(b"".join(parts), size <= MAX_WIRE, encoding)


async def off_loop(work: Callable[[], T], *, is_large: bool) -> T:
    """Do the work, in a thread where it would hold the loop."""
    if not is_large:
        return work()
    return await asyncio.get_running_loop().run_in_executor(_THREADS, contextvars.copy_context().run, work)


async def read_tree(request: Request) -> object:
    """The JSON body as plain data. Raises PayloadTooLarge, InvalidRequest."""
    received = await receive(request)
    return await off_loop(lambda: wire_json.parse(received.decoded()), is_large=received.is_large)


async def read(request: Request, model: type[AnyBody]) -> AnyBody:
    """The JSON body as a message. Raises PayloadTooLarge, InvalidRequest, ValidationFailed."""
    received = await receive(request)
    return await off_loop(lambda: wire_json.validate(model, wire_json.parse(received.decoded())), is_large=received.is_large)
