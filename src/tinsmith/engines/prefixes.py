"""Prompts that begin alike: where they are cut, what names a beginning, and the bounded store of what was computed of it.

Purely token bytes and sizes; knows nothing of tensors. A prompt is computed in chunks at fixed places, so what a chunk comes to is a
function of the adapter and of the tokens up to the chunk's end, and it may stand for itself in every prompt that begins so.
"""

import hashlib
from collections import OrderedDict
from collections.abc import Iterator
from typing import Generic, TypeVar

from tinsmith.engines.base import Files

PREFILL_CHUNK = 256  # tokens; also the budget of a step, which bounds how long a long prompt holds up the running sequences
_INT32 = 4

Held = TypeVar("Held")


def root(scope: str, adapter: bytes) -> bytes:
    """What names the empty beginning. Prompts of two scopes share nothing, so no caller learns from a hit what another has asked; nor do
    those of two adapters. `adapter`: a digest of its weights, empty for the base model."""
    return hashlib.sha256(b"%d:%b%b" % (len(scope.encode()), scope.encode(), adapter)).digest()


def digest_of(files: Files) -> bytes:
    """Of an adapter's files: equal for equal names and contents."""
    hashed = hashlib.sha256()
    for name in sorted(files):
        hashed.update(hashlib.sha256(name.encode()).digest() + hashlib.sha256(files[name]).digest())
    return hashed.digest()


def chunk_keys(start: bytes, token_bytes: bytes) -> Iterator[bytes]:
    """The names of the beginnings that end with each whole chunk. `start` is a `root`; tokens are int32."""
    size = PREFILL_CHUNK * _INT32
    name = start
    for end in range(size, len(token_bytes) + 1, size):
        name = hashlib.sha256(name + token_bytes[end - size : end]).digest()
        yield name


class PrefixCache(Generic[Held]):
    """Holds the most recently used chunks, `max_bytes` of them in all; 0 holds none."""

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._held: OrderedDict[bytes, tuple[Held, int]] = OrderedDict()
        self._num_bytes = 0

    @property
    def num_bytes(self) -> int:
        return self._num_bytes

    def get(self, key: bytes) -> Held | None:
        found = self._held.get(key)
        if found is None:
            return None
        self._held.move_to_end(key)
        return found[0]

    def put(self, key: bytes, chunk: Held, num_bytes: int) -> None:
        """A chunk of more than all bytes is not kept. What is there stays: a name has one content."""
        if key in self._held or num_bytes > self._max_bytes:
            return
        self._held[key] = chunk, num_bytes
        self._num_bytes += num_bytes
        while self._num_bytes > self._max_bytes:
            _, (_, freed) = self._held.popitem(last=False)
            self._num_bytes -= freed
