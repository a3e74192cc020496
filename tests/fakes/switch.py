"""What stands before two servers while one takes over from the other: a TCP proxy that can be pointed elsewhere."""

import contextlib
import socket
import threading

import httpx


class Switch:
    """New connections go where it points now; those that are open stay where they are."""

    def __init__(self, target: str) -> None:
        self._listener = socket.create_server(("127.0.0.1", 0), backlog=128)
        self.url = f"http://127.0.0.1:{self._listener.getsockname()[1]}"
        self.target = target
        threading.Thread(target=self._accept, daemon=True).start()

    def close(self) -> None:
        self._listener.close()

    def _accept(self) -> None:
        while True:
            try:
                client, _ = self._listener.accept()
            except OSError:
                return
            url = httpx.URL(self.target)
            server = socket.create_connection((url.host, url.port))
            for source, sink in ((client, server), (server, client)):
                threading.Thread(target=_pass_on, args=(source, sink), daemon=True).start()


def _pass_on(source: socket.socket, sink: socket.socket) -> None:
    """Bytes, and at last the end, of one direction."""
    with contextlib.suppress(OSError):
        while data := source.recv(65536):
            sink.sendall(data)
    with contextlib.suppress(OSError):
        sink.shutdown(socket.SHUT_WR)
