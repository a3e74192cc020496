"""uvicorn's HTTP protocol, with a bound on the head of a request before anything of it is one.

The parser keeps what it has of a head until the head ends, however long that is. Here a head beyond the bound is not parsed further: its
rest is read and dropped, so that the caller, who reads no answer before it has sent its request, gets the same typed refusal as for a head
that is a little too large; then the connection closes. Nothing of such a request reaches the app.
"""

from starlette.types import Receive, Scope, Send
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from tinsmith.gateway.auth import MAX_HEAD, head_too_large
from tinsmith.gateway.errors import answer
from tinsmith.gateway.request_ids import RequestIds

MAX_DROPPED = 64 * 1024 * 1024  # bytes of one head that are read to answer it; beyond, the connection is cut
_BLANK_LINE = b"\r\n\r\n"
_CLOSING = b"x:\r\n\r\n"  # ends a head wherever it was cut: in a name, in a value or between two headers


class BoundedHeads(HttpToolsProtocol):
    """One connection. A head may hold MAX_HEAD bytes, and the first and the last chunk that the socket gave beside them."""

    _is_in_head = False
    _num_held = 0  # bytes of whole chunks of the head that runs
    _is_cut = False
    _last = b""  # of what was dropped: a blank line may be split over two chunks
    _num_dropped = 0

    def data_received(self, data: bytes) -> None:
        if self._is_cut:
            self._drop(data)
            return
        was_in_head = self._is_in_head
        super().data_received(data)
        if was_in_head and self._is_in_head:
            self._num_held += len(data)
            if self._num_held > MAX_HEAD:
                self._is_cut = True
                self._last = data[-len(_BLANK_LINE) + 1 :]

    def on_message_begin(self) -> None:
        super().on_message_begin()
        self._is_in_head, self._num_held = True, 0

    def on_headers_complete(self) -> None:
        self._is_in_head = False
        super().on_headers_complete()

    def _drop(self, data: bytes) -> None:
        if not self._is_in_head:
            return  # what follows a head that was refused
        seen = self._last + data
        self._last = seen[-len(_BLANK_LINE) + 1 :]
        self._num_dropped += len(data)
        if _BLANK_LINE in seen:
            self._refuse()
        elif self._num_dropped > MAX_DROPPED:
            self.transport.abort()

    def _refuse(self) -> None:
        """End the head for the parser, with an app of our own for what it then starts."""
        self.app = _REFUSING
        super().data_received(_CLOSING)
        self._is_in_head = False
        if self.cycle is not None:
            self.cycle.keep_alive = False


async def _refusing(scope: Scope, receive: Receive, send: Send) -> None:
    await answer(scope, head_too_large())(scope, receive, send)


_REFUSING = RequestIds(_refusing)
