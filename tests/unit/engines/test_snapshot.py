"""An adapter as files and back, and the files that are refused."""

import json
from dataclasses import replace

import pytest
import torch
from safetensors.torch import load, save

from tinsmith.engines import snapshot
from tinsmith.engines.base import Contents
from tinsmith.engines.lora import Adapter, Group, Layout, Site
from tinsmith.protocol.errors import ValidationFailed
from tinsmith.protocol.training import AdamParams, LoraConfig, SgdParams

SITES = [Site("model.layers.0.self_attn.q_proj", Group.ATTN, 6, 4), Site("lm_head", Group.UNEMBED, 6, 10)]
CONFIG = LoraConfig(rank=2, seed=1, train_mlp=False)
LAYOUT = Layout.of(SITES, CONFIG)


@pytest.fixture
def adapter() -> Adapter:
    """One step taken, and a gradient accumulated after it."""
    torch.manual_seed(0)
    adapter = Adapter.fresh(CONFIG, LAYOUT, torch.device("cpu"))
    adapter.accumulate(torch.randn(LAYOUT.size))
    adapter.step(AdamParams())
    adapter.accumulate(torch.randn(LAYOUT.size))
    return adapter


def test_a_sampler_capture_is_a_peft_folder(adapter: Adapter) -> None:
    files = snapshot.capture(adapter, Contents.SAMPLER, "org/base")
    assert set(files) == {"adapter_config.json", "adapter_model.safetensors"}
    config = json.loads(files["adapter_config.json"])
    assert (config["r"], config["lora_alpha"], config["target_modules"]) == (2, 32, ["lm_head", "q_proj"])
    assert config["base_model_name_or_path"] == "org/base"
    shapes = {name: tuple(tensor.shape) for name, tensor in load(files["adapter_model.safetensors"]).items()}
    assert shapes == {
        "base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight": (2, 6),
        "base_model.model.model.layers.0.self_attn.q_proj.lora_B.weight": (4, 2),
        "base_model.model.lm_head.lora_A.weight": (2, 6),
        "base_model.model.lm_head.lora_B.weight": (10, 2),
    }


def test_a_snapshot_holds_everything_bit_for_bit(adapter: Adapter) -> None:
    state = snapshot.read(snapshot.capture(adapter, Contents.SNAPSHOT, "b"), LAYOUT, optimizer=True)
    assert torch.equal(state.weights_P, adapter.weights_P)
    for held in (adapter.moments, state.moments):
        assert held is not None
        assert held.exp_avg_P is not None
        assert held.exp_avg_sq_P is not None
        assert (held.optimizer, held.step) == ("adamw", 1)
    assert all(torch.equal(getattr(state.moments, name), getattr(adapter.moments, name)) for name in ("exp_avg_P", "exp_avg_sq_P"))
    assert state.grad_P is not None
    assert adapter.grad_P is not None
    assert torch.equal(state.grad_P, adapter.grad_P)


def test_adams_state_is_written_as_older_servers_read_it(adapter: Adapter) -> None:
    files = snapshot.capture(adapter, Contents.SNAPSHOT, "b")
    assert json.loads(files["train_state.json"]) == {"schema_version": 1, "step": 1, "accumulated": True}


@pytest.mark.parametrize("momentum", [0.0, 0.9])
def test_a_snapshot_holds_sgd_with_and_without_its_buffer(momentum: float) -> None:
    adapter = Adapter.fresh(CONFIG, LAYOUT, torch.device("cpu"))
    adapter.train(torch.randn(LAYOUT.size), SgdParams(momentum=momentum))
    assert adapter.moments is not None
    files = snapshot.capture(adapter, Contents.CHECKPOINT, "b")
    assert json.loads(files["train_state.json"])["schema_version"] == 2
    moments = snapshot.read(files, LAYOUT, optimizer=True).moments
    assert moments is not None
    assert (moments.optimizer, moments.step, moments.exp_avg_sq_P) == ("sgd", 1, None)
    if momentum == 0:
        assert moments.exp_avg_P is None
        return
    assert moments.exp_avg_P is not None
    assert adapter.moments.exp_avg_P is not None
    assert torch.equal(moments.exp_avg_P, adapter.moments.exp_avg_P)
    with pytest.raises(ValidationFailed, match=r"1 tensors are missing \['exp_avg'\]"):
        snapshot.read(files | {"train_state.safetensors": save({})}, LAYOUT, optimizer=True)


def test_a_checkpoint_leaves_the_unspent_gradient_out(adapter: Adapter) -> None:
    state = snapshot.read(snapshot.capture(adapter, Contents.CHECKPOINT, "b"), LAYOUT, optimizer=True)
    assert state.grad_P is None
    assert state.moments is not None


def test_an_adapter_before_its_first_step_has_no_moments() -> None:
    fresh = Adapter.fresh(CONFIG, LAYOUT, torch.device("cpu"))
    state = snapshot.read(snapshot.capture(fresh, Contents.SNAPSHOT, "b"), LAYOUT, optimizer=True)
    assert (state.moments, state.grad_P) == (None, None)


def test_weights_alone_can_be_read_from_a_sampler_capture(adapter: Adapter) -> None:
    state = snapshot.read(snapshot.capture(adapter, Contents.SAMPLER, "b"), LAYOUT, optimizer=False)
    assert torch.equal(state.weights_P, adapter.weights_P)
    assert state.moments is None


def test_a_capture_does_not_follow_the_adapter(adapter: Adapter) -> None:
    files = snapshot.capture(adapter, Contents.SNAPSHOT, "b")
    before = adapter.weights_P.clone()
    adapter.step(AdamParams(learning_rate=1.0))
    assert torch.equal(snapshot.read(files, LAYOUT, optimizer=True).weights_P, before)


def test_weights_that_diverged_are_kept_as_they_are(adapter: Adapter) -> None:
    """A snapshot must restore whatever state a model is in; refusing it would block the model for ever."""
    adapter.weights_P[3] = torch.inf
    assert torch.equal(
        snapshot.read(snapshot.capture(adapter, Contents.SNAPSHOT, "b"), LAYOUT, optimizer=True).weights_P, adapter.weights_P
    )


def damaged(files: dict[str, bytes], fault: str) -> dict[str, bytes]:
    state = json.loads(files["train_state.json"])
    config = json.loads(files["adapter_config.json"])
    weights, moments = load(files["adapter_model.safetensors"]), load(files["train_state.safetensors"])
    name = "base_model.model.lm_head.lora_A.weight"
    changed: dict[str, dict[str, bytes]] = {
        "weights cut short": {"adapter_model.safetensors": files["adapter_model.safetensors"][:-8]},
        "weights empty": {"adapter_model.safetensors": b""},
        "moments cut short": {"train_state.safetensors": files["train_state.safetensors"][:100]},
        "state unreadable": {"train_state.json": b"{"},
        "state of a newer schema": {"train_state.json": json.dumps(state | {"schema_version": 3, "more": 1}).encode()},
        "alpha": {"adapter_config.json": json.dumps(config | {"lora_alpha": 16}).encode()},
        "config without rank": {"adapter_config.json": b"{}"},
        "tensor missing": {"adapter_model.safetensors": save({key: value for key, value in weights.items() if key != name})},
        "tensor surplus": {"adapter_model.safetensors": save(weights | {"extra": torch.zeros(1)})},
        "shape": {"adapter_model.safetensors": save(weights | {name: torch.zeros(3, 6)})},
        "dtype": {"adapter_model.safetensors": save(weights | {name: torch.zeros(2, 6, dtype=torch.bfloat16)})},
        "moments of another size": {"train_state.safetensors": save(moments | {"exp_avg": torch.zeros(3)})},
        "gradient missing": {"train_state.safetensors": save({key: value for key, value in moments.items() if key != "grad"})},
    }
    return files | changed[fault]


@pytest.mark.proves("R11")
@pytest.mark.parametrize(
    ("fault", "message"),
    [
        ("weights cut short", "adapter_model.safetensors: not a whole safetensors file"),
        ("weights empty", "adapter_model.safetensors: not a whole safetensors file"),
        ("moments cut short", "train_state.safetensors: not a whole safetensors file"),
        ("state unreadable", "train_state.json: 1 faults"),
        ("state of a newer schema", "schema 3 is newer than this server's 2; upgrade"),
        ("alpha", "lora_alpha is 16"),
        ("config without rank", "adapter_config.json: 3 faults"),
        ("tensor missing", "1 tensors are missing"),
        ("tensor surplus", r"1 do not belong \['extra'\]"),
        ("shape", r"expected float32 \[2, 6\], got torch.float32 \[3, 6\]"),
        ("dtype", "got torch.bfloat16"),
        ("moments of another size", "exp_avg: expected float32"),
        ("gradient missing", r"1 tensors are missing \['grad'\]"),
    ],
)
def test_damaged_files_are_refused(adapter: Adapter, fault: str, message: str) -> None:
    files = damaged(snapshot.capture(adapter, Contents.SNAPSHOT, "b"), fault)
    with pytest.raises(ValidationFailed, match=message):
        snapshot.read(files, LAYOUT, optimizer=True)


@pytest.mark.parametrize("name", ["adapter_config.json", "adapter_model.safetensors", "train_state.json", "train_state.safetensors"])
def test_a_missing_file_is_named(adapter: Adapter, name: str) -> None:
    files = snapshot.capture(adapter, Contents.SNAPSHOT, "b")
    del files[name]
    with pytest.raises(ValidationFailed, match=f"{name}: missing"):
        snapshot.read(files, LAYOUT, optimizer=True)


def test_another_rank_is_refused(adapter: Adapter) -> None:
    files = snapshot.capture(adapter, Contents.CHECKPOINT, "b")
    with pytest.raises(ValidationFailed, match="the checkpoint has rank 2, the model 4"):
        snapshot.read(files, Layout.of(SITES, CONFIG.model_copy(update={"rank": 4})), optimizer=False)


def test_other_modules_are_refused(adapter: Adapter) -> None:
    files = snapshot.capture(adapter, Contents.CHECKPOINT, "b")
    narrower = Layout.of(SITES, CONFIG.model_copy(update={"train_unembed": False}))
    with pytest.raises(ValidationFailed, match=r"trains \['lm_head', 'q_proj'\], the model \['q_proj'\]"):
        snapshot.read(files, narrower, optimizer=False)


def test_a_base_model_of_another_shape_is_refused(adapter: Adapter) -> None:
    files = snapshot.capture(adapter, Contents.CHECKPOINT, "b")
    wider = Layout.of([replace(SITES[0], in_features=8), SITES[1]], CONFIG)
    with pytest.raises(ValidationFailed, match=r"q_proj.lora_A.weight: expected float32"):
        snapshot.read(files, wider, optimizer=False)
