"""A merged model says what base model and adapter say together, and an adapter that does not fit leaves no folder."""

import json
from pathlib import Path

import pytest
import torch
from peft import PeftModel
from safetensors.torch import load, load_file, save
from torch import Tensor
from transformers import AutoModelForCausalLM

from tinsmith.engines import merging
from tinsmith.engines.base import Contents
from tinsmith.engines.merging import merge
from tinsmith.engines.peft_engine import PeftEngine
from tinsmith.protocol.errors import ValidationFailed
from tinsmith.protocol.sessions import BaseModelInfo
from tinsmith.protocol.training import LoraConfig

TOKENS = torch.tensor([[1, 5, 9, 200, 31, 7]])
CONFIG, MODEL = "adapter_config.json", "adapter_model.safetensors"

pytestmark = pytest.mark.filterwarnings("ignore:Model has `tie_word_embeddings:UserWarning")  # PEFT, of an adapter on a tied head


def adapter_of(peft: PeftEngine, *, train_unembed: bool = True) -> dict[str, bytes]:
    """An adapter as trained: both factors of every pair are random."""
    model_id = f"merged-{train_unembed}"
    peft.create_adapter(model_id, LoraConfig(rank=4, seed=1, train_unembed=train_unembed))
    files = dict(peft.capture(model_id, Contents.SAMPLER))
    peft.drop_adapter(model_id)
    torch.manual_seed(3)
    return files | {MODEL: save({name: torch.randn_like(tensor) * 0.05 for name, tensor in load(files[MODEL]).items()})}


def logits(model: torch.nn.Module) -> Tensor:
    with torch.no_grad():
        found: Tensor = model(input_ids=TOKENS).logits
    return found


def of_peft(base: str, files: dict[str, bytes], folder: Path) -> Tensor:
    folder.mkdir()
    for name, content in files.items():
        (folder / name).write_bytes(content)
    return logits(PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32), str(folder)).eval())


def of_merged(folder: Path) -> Tensor:
    return logits(AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval())


@pytest.mark.parametrize("train_unembed", [True, False])
def test_a_merged_model_is_base_model_and_adapter(peft: PeftEngine, tiny_model: BaseModelInfo, tmp_path: Path, train_unembed: bool) -> None:
    files = adapter_of(peft, train_unembed=train_unembed)
    warnings = merge(Path(tiny_model.path), files, tmp_path / "merged")
    torch.testing.assert_close(of_merged(tmp_path / "merged"), of_peft(tiny_model.path, files, tmp_path / "peft"), atol=2e-5, rtol=1e-4)
    plain = logits(AutoModelForCausalLM.from_pretrained(tiny_model.path, dtype=torch.float32).eval())
    assert (of_merged(tmp_path / "merged") - plain).abs().max() > 1e-2
    assert [("embedding" in warning, "larger" in warning) for warning in warnings] == [(True, True)] * train_unembed
    assert (tmp_path / "merged" / "tokenizer.json").is_file()


def test_a_tied_head_gets_a_matrix_of_its_own_and_inputs_stay(peft: PeftEngine, tiny_model: BaseModelInfo, tmp_path: Path) -> None:
    merge(Path(tiny_model.path), adapter_of(peft), tmp_path / "merged")
    assert json.loads((tmp_path / "merged" / "config.json").read_text())["tie_word_embeddings"] is False
    before, after = (load_file(Path(folder) / "model.safetensors") for folder in (tiny_model.path, tmp_path / "merged"))
    name = "model.embed_tokens.weight"
    assert torch.equal(before[name], after[name])
    assert set(after) - set(before) == {"lm_head.weight"}
    assert not torch.equal(after["lm_head.weight"], after[name])


def test_shards_stay_shards_and_keep_their_dtype(peft: PeftEngine, tiny_model: BaseModelInfo, tmp_path: Path) -> None:
    base, files = tmp_path / "base", adapter_of(peft)
    AutoModelForCausalLM.from_pretrained(tiny_model.path, dtype=torch.bfloat16).save_pretrained(base, max_shard_size="200KB")
    merge(base, files, tmp_path / "merged")
    shards = sorted(path.name for path in base.glob("*.safetensors"))
    assert len(shards) > 1
    assert sorted(path.name for path in (tmp_path / "merged").glob("*.safetensors")) == shards
    index = json.loads((tmp_path / "merged" / "model.safetensors.index.json").read_text())
    assert {name: shard for shard in shards for name in load_file(tmp_path / "merged" / shard)} == index["weight_map"]
    total = sum(tensor.nbytes for shard in shards for tensor in load_file(tmp_path / "merged" / shard).values())
    assert index["metadata"]["total_size"] == total
    assert {tensor.dtype for shard in shards for tensor in load_file(tmp_path / "merged" / shard).values()} == {torch.bfloat16}
    expected = of_peft(str(base), files, tmp_path / "peft")
    torch.testing.assert_close(of_merged(tmp_path / "merged"), expected, atol=0.05, rtol=0.05)


@pytest.mark.parametrize("fault", ["no config", "no weights", "cut", "rslora", "half a pair", "another matrix", "another shape"])
def test_an_adapter_that_does_not_fit_leaves_no_folder(peft: PeftEngine, tiny_model: BaseModelInfo, tmp_path: Path, fault: str) -> None:
    files = adapter_of(peft)
    tensors = load(files[MODEL])
    name = next(name for name in sorted(tensors) if "q_proj.lora_A" in name)
    match fault:
        case "no config":
            del files[CONFIG]
        case "no weights":
            del files[MODEL]
        case "cut":
            files[MODEL] = files[MODEL][:-4]
        case "rslora":
            files[CONFIG] = json.dumps(json.loads(files[CONFIG]) | {"use_rslora": True}).encode()
        case "half a pair":
            files[MODEL] = save({key: tensor for key, tensor in tensors.items() if key != name})
        case "another matrix":
            files[MODEL] = save({key.replace("q_proj", "query"): tensor for key, tensor in tensors.items()})
        case "another shape":
            files[MODEL] = save(tensors | {name: torch.zeros(4, 3)})
    with pytest.raises(ValidationFailed):
        merge(Path(tiny_model.path), files, tmp_path / "merged")
    assert not (tmp_path / "merged").exists()


def test_a_folder_that_is_there_is_not_touched(peft: PeftEngine, tiny_model: BaseModelInfo, tmp_path: Path) -> None:
    (tmp_path / "mine").write_text("kept")
    with pytest.raises(FileExistsError):
        merge(Path(tiny_model.path), adapter_of(peft), tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["mine"]


def test_a_folder_without_weights_is_no_base_model(peft: PeftEngine, tmp_path: Path) -> None:
    (tmp_path / "base").mkdir()
    with pytest.raises(ValidationFailed, match=merging.WHOLE):
        merge(tmp_path / "base", adapter_of(peft), tmp_path / "merged")
