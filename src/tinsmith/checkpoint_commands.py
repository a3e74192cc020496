"""`tinsmith checkpoints export`: a checkpoint of a running server as a folder that PEFT reads, or merged into its base model.

Goes through the Tinker side's signed links, as every client may; what a caller may not have it cannot export. PyTorch is imported by name,
and only for a merge.
"""

import argparse
import importlib
import shutil
import sys
import tarfile
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO
from urllib.parse import quote

import httpx
from pydantic import BaseModel, ConfigDict, ValidationError

from tinsmith.config import ConfigError, cache_dir, operator_key
from tinsmith.engines.base import ADAPTER_CONFIG, ADAPTER_MODEL
from tinsmith.engines.models import ModelSourceError, resolve
from tinsmith.operations import OperationFailed
from tinsmith.protocol.errors import TinsmithError
from tinsmith.state.catalog import split_path

DEFAULT_URL = "http://127.0.0.1:8700"
REQUEST_S = 60.0  # between two pieces of an answer
_COMPLETE = "checkpoint_complete"  # the last member of a whole archive


class _Archive(BaseModel):
    model_config = ConfigDict(extra="ignore")

    url: str


class _AdapterConfig(BaseModel):
    model_config = ConfigDict(extra="ignore")

    base_model_name_or_path: str


def add_parsers(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    checkpoints = commands.add_parser("checkpoints", help="export checkpoints", description="Export the checkpoints of a running server.")
    actions = checkpoints.add_subparsers(dest="action", required=True, metavar="ACTION")
    export = actions.add_parser(
        "export",
        help="write a checkpoint to a folder",
        description="Write a checkpoint as a PEFT folder, or merged into its base model as a folder that transformers reads.",
    )
    export.add_argument("path", metavar="PATH", help="tinker://..., as it was saved")
    export.add_argument("--out", type=Path, required=True, metavar="DIR", help="a folder that does not exist yet")
    export.add_argument("--merged", action="store_true", help="merge the adapter into its base model")
    export.add_argument("--base", default=None, metavar="SOURCE", help="with --merged: 'smollm2', a folder, or a hub id; default: its name")
    export.add_argument("--url", default=DEFAULT_URL, help=f"of the server; default {DEFAULT_URL}")
    export.add_argument("--api-key", default=None, help="default: $TINSMITH_API_KEY")


def run(asked: argparse.Namespace) -> int:
    """Raises ConfigError, OperationFailed."""
    key = operator_key() if asked.api_key is None else asked.api_key
    if key is not None and not (key.isascii() and key.isprintable()):
        raise ConfigError(["--api-key: must be printable ASCII; pass the key as it was issued"])
    if asked.base is not None and not asked.merged:
        raise ConfigError(["--base: is for --merged; add that, or leave it out"])
    if asked.out.exists():
        raise OperationFailed(f"--out: {asked.out} exists; name a new folder")
    files = _download(asked.url, key, asked.path)
    try:
        if asked.merged:
            _merge(files, asked.base, asked.out)
        else:
            _write(files, asked.out)
    except OSError as error:
        raise OperationFailed(f"--out: {asked.out}: {error.strerror or error}; name a folder that can be written") from error
    print(asked.out)
    return 0


def _download(url: str, key: str | None, path: str) -> dict[str, bytes]:
    """The adapter's two files."""
    try:
        run_id, kind, name = split_path(path)
    except TinsmithError as error:
        raise OperationFailed(error.message) from error
    archive = f"/api/v1/training_runs/{quote(run_id)}/checkpoints/{kind}/{quote(name)}/archive"
    headers = {"Accept": "application/json"} | ({} if key is None else {"X-API-Key": key})
    with _told(url), httpx.Client(timeout=REQUEST_S) as http, tempfile.TemporaryFile() as file:
        link = _checked(http.get(url.rstrip("/") + archive, headers=headers))
        with http.stream("GET", _Archive.model_validate_json(link.content).url) as answer:
            if answer.is_error:
                answer.read()
            for chunk in _checked(answer).iter_bytes():
                file.write(chunk)
        file.seek(0)
        return _unpacked(file)


def _unpacked(file: IO[bytes]) -> dict[str, bytes]:
    """Members are read by name, so none is ever written where its name says."""
    with tarfile.open(fileobj=file, mode="r:") as archive:
        if _COMPLETE not in archive.getnames():
            raise OperationFailed("the archive is not whole; export again")
        found = {name: archive.extractfile(name) for name in (ADAPTER_CONFIG, ADAPTER_MODEL)}
        return {name: member.read() for name, member in found.items() if member is not None}


def _write(files: dict[str, bytes], out: Path) -> None:
    """All of it or nothing."""
    out.parent.mkdir(parents=True, exist_ok=True)
    scratch = Path(tempfile.mkdtemp(prefix=f".{out.name}-", dir=out.parent))
    try:
        for name, content in files.items():
            (scratch / name).write_bytes(content)
        scratch.chmod(0o755)
        scratch.rename(out)
    finally:
        shutil.rmtree(scratch, ignore_errors=True)


def _merge(files: dict[str, bytes], source: str | None, out: Path) -> None:
    try:
        name = _AdapterConfig.model_validate_json(files[ADAPTER_CONFIG]).base_model_name_or_path
        base = Path(resolve(source, name, cache_dir()).path)
        warnings = importlib.import_module("tinsmith.engines.merging").merge(base, files, out)
    except ModelSourceError as error:
        raise OperationFailed(f"--base: {error}") from error
    except ValidationError as error:
        raise OperationFailed(f"{ADAPTER_CONFIG} names no base model, so this adapter cannot be merged; leave --merged out") from error
    except TinsmithError as error:
        raise OperationFailed(error.message) from error
    for warning in warnings:
        print(f"warning: {warning}", file=sys.stderr)


def _checked(answer: httpx.Response) -> httpx.Response:
    """Raises OperationFailed with what the server said."""
    if answer.is_error:
        raise OperationFailed(f"the server refuses ({answer.status_code}): {answer.text[:500]}", answer.status_code)
    return answer


@contextmanager
def _told(url: str) -> Iterator[None]:
    """What a network and its answers may do, as OperationFailed."""
    try:
        yield
    except (httpx.HTTPError, httpx.InvalidURL) as error:
        raise OperationFailed(f"--url: {url} cannot be asked ({error}); is the server up?") from error
    except (ValidationError, tarfile.TarError, KeyError) as error:
        raise OperationFailed(f"--url: {url} answers as no Tinsmith does; name its address") from error
