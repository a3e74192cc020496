"""Downloads: the files of artifacts, to whoever has a signed link; these routes ask for no key.

A file is streamed as the manifest lists it, an archive is built from the manifest: no directory is walked, and no name comes from the
caller unchecked. Who may have a link, `tinker.exports` decides.
"""

import asyncio
import tarfile
from collections.abc import Iterator, Mapping

from fastapi import APIRouter, Request
from starlette.responses import StreamingResponse

from tinsmith.gateway.auth import SIGNED_PREFIX
from tinsmith.gateway.deps import Services, ServicesDep
from tinsmith.gateway.signing import ARCHIVE, Link, Links
from tinsmith.lifecycle.checkpoints import Checkpoints
from tinsmith.lifecycle.storage import FileEntry
from tinsmith.protocol.errors import NotFound

PREFIX = SIGNED_PREFIX
ADAPTER_FILES = ("adapter_config.json", "adapter_model.safetensors")  # what an archive holds, of whichever kind the checkpoint is
COMPLETE = "checkpoint_complete"  # the empty file by which clients know that an archive is whole

router = APIRouter(prefix="/downloads")


class ArchivePlan:
    """A tar of the adapter's files, in the order of their names, with the mark of completeness last."""

    def __init__(self, files: Mapping[str, FileEntry]) -> None:
        self._files = {name: files[name] for name in ADAPTER_FILES if name in files}

    @property
    def size(self) -> int:
        """Bytes of the whole archive."""
        entries = sum(tarfile.BLOCKSIZE + entry.size + _padding(entry.size) for entry in self._files.values())
        unpadded = entries + tarfile.BLOCKSIZE + 2 * tarfile.BLOCKSIZE
        return unpadded + -unpadded % tarfile.RECORDSIZE

    def stream(self, artifacts: Checkpoints, artifact: str) -> Iterator[bytes]:
        """Raises ValidationFailed (damaged), OSError; the archive then has no end."""
        size = 0
        for name, entry in self._files.items():
            yield _header(name, entry.size)
            yield from artifacts.stream(artifact, name, entry)
            yield bytes(_padding(entry.size))
            size += tarfile.BLOCKSIZE + entry.size + _padding(entry.size)
        yield _header(COMPLETE, 0)
        yield bytes(self.size - size - tarfile.BLOCKSIZE)


async def link_to(services: Services, request: Request, tenant: str, artifact: str, file: str, expires_s: int) -> str:
    """The address of a file of the artifact, or of its archive, for a caller without a key."""
    path = f"{artifact}/{file}" if file != ARCHIVE else artifact
    what = "files" if file != ARCHIVE else "archives"
    query = await Links(services.store).query(Link("GET", tenant, artifact, file, expires_s))
    return f"{str(request.base_url).rstrip('/')}{PREFIX}/{what}/{path}?{query}"


@router.get("/files/{artifact:path}/{file}")
async def download_file(artifact: str, file: str, request: Request, services: ServicesDep) -> StreamingResponse:
    await Links(services.store).check(request.method, artifact, file, request.query_params)
    manifest = await asyncio.to_thread(services.artifacts.manifest, artifact)
    entry = manifest.files.get(file)
    if entry is None:
        raise NotFound(f"the checkpoint has no file {file[:100]!r}")
    return _streamed(services.artifacts.stream(artifact, file, entry), entry.size, file, "application/octet-stream")


@router.get("/archives/{artifact:path}")
async def download_archive(artifact: str, request: Request, services: ServicesDep) -> StreamingResponse:
    await Links(services.store).check(request.method, artifact, ARCHIVE, request.query_params)
    manifest = await asyncio.to_thread(services.artifacts.manifest, artifact)
    plan = ArchivePlan(manifest.files)
    return _streamed(plan.stream(services.artifacts, artifact), plan.size, "checkpoint.tar", "application/x-tar")


def _streamed(chunks: Iterator[bytes], size: int, name: str, media_type: str) -> StreamingResponse:
    """Read in threads, one chunk at a time. A stream that ends early breaks the connection, since its length was told."""
    headers = {"Content-Length": str(size), "Content-Disposition": f'attachment; filename="{name}"', "Cache-Control": "private, no-store"}
    return StreamingResponse(chunks, media_type=media_type, headers=headers)


def _header(name: str, size: int) -> bytes:
    entry = tarfile.TarInfo(name)
    entry.size, entry.mode = size, 0o644
    return entry.tobuf(format=tarfile.USTAR_FORMAT)


def _padding(size: int) -> int:
    return -size % tarfile.BLOCKSIZE
