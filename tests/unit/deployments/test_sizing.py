"""Memory of a configuration, against numbers computed by hand from the tiny model's config.json and from SmolLM2's sizes."""

from pathlib import Path

import pytest

from tinsmith.config import ServerConfig, validate
from tinsmith.deployments import sizing
from tinsmith.deployments.sizing import Architecture, Estimate, Share, estimate, memory_warning
from tinsmith.engines import unembed
from tinsmith.protocol.sessions import BaseModelInfo

MIB = 1024 * 1024
SMOLLM2 = Architecture(
    hidden_size=576,
    num_hidden_layers=30,
    intermediate_size=1536,
    vocab_size=49152,
    num_attention_heads=9,
    num_key_value_heads=3,
    max_position_embeddings=8192,
    tie_word_embeddings=True,
)


def config_of(tree: dict[str, object] | None = None, **model: object) -> ServerConfig:
    return validate({"models": [{"name": "org/model", **model}], **(tree or {})})


def found(needed: Estimate, where: str, what: str) -> Share:
    (share,) = [share for share in needed.shares if share.where.startswith(where) and what in share.what]
    return share


def test_parameters_of_smollm2_are_counted_as_its_card_says() -> None:
    assert sizing.num_parameters(SMOLLM2) == 134_515_008
    untied = SMOLLM2.model_copy(update={"tie_word_embeddings": False})
    assert sizing.num_parameters(untied) == 134_515_008 + 49152 * 576


def test_an_adapter_has_rank_times_inputs_and_outputs_of_every_layer() -> None:
    layer = (576 + 576) + 2 * (576 + 192) + (576 + 576) + 2 * (576 + 1536) + (1536 + 576)
    assert sizing.num_adapter_parameters(SMOLLM2, 32) == 32 * (30 * layer + 576 + 49152)


def test_a_token_of_the_cache_is_keys_and_values_of_every_layer() -> None:
    assert sizing.cache_bytes(SMOLLM2, 1, 2) == 30 * 2 * 192 * 2


def test_the_tiny_model_is_counted_from_its_config(tiny_model: BaseModelInfo, tmp_path: Path) -> None:
    config = config_of(
        source=tiny_model.path,
        dtype="bf16",
        max_context=100,
        trainer={"max_adapters": 3, "micro_batch_tokens": 10, "replicas": 2},
        sampler={"max_rows": 4, "max_adapters": 5},
    )
    needed = estimate(config, tmp_path)
    assert needed.is_whole
    # 64 wide, 2 layers, 128 inner, 4 and 2 heads of 16, 49152 words, tied.
    parameters = 49152 * 64 + 2 * (2 * 64 * 64 + 2 * 64 * 32 + 3 * 64 * 128 + 2 * 64) + 64
    adapter = 32 * (2 * (2 * (64 + 64) + 2 * (64 + 32) + 3 * (64 + 128)) + 64 + 49152)
    kept = 2 * (4 * 64 + 2 * (64 + 2 * 32) + 2 * 64 + 4 * 128) + 4 * 4 * 64
    assert found(needed, "trainer", "weights") == Share("trainer org/model", "weights", 2, parameters * 2 / MIB)
    assert found(needed, "trainer", "3 adapters of rank 32").each_mib == 3 * adapter * 16 / MIB
    assert found(needed, "trainer", "10 tokens").each_mib == (10 * 2 * kept + 10 * 49152 * (2 + 12)) / MIB
    assert found(needed, "trainer", "process").total_mib == 2 * sizing.TRAINER_MIB
    assert found(needed, "sampler", "weights").each_mib == parameters * 2 / MIB
    assert found(needed, "sampler", "5 adapters").each_mib == 5 * adapter * 4 / MIB
    assert found(needed, "sampler", "4 rows of 100 tokens").each_mib == 4 * 100 * 2 * 2 * 32 * 2 / MIB
    assert needed.host_mib == pytest.approx(sum(share.total_mib or 0 for share in needed.shares))


def test_logits_are_bounded_by_the_chunk_that_a_trainer_holds() -> None:
    assert sizing.MAX_LOGITS == unembed.MAX_LOGITS
    rows = sizing.MAX_LOGITS // 49152
    per_token = (sizing.activation_bytes(SMOLLM2, rows + 1, 2) - sizing.activation_bytes(SMOLLM2, rows, 2)) / 30
    assert per_token == 2 * (4 * 576 + 2 * (576 + 2 * 192) + 2 * 576 + 4 * 1536) + 16 * 576


def test_a_process_without_adapters_or_work_is_what_was_measured(tmp_path: Path) -> None:
    """Resident memory of idle processes with SmolLM2 in bf16: the baselines are those minus the weights."""
    weights = sizing.num_parameters(SMOLLM2) * 2 / MIB
    assert sizing.TRAINER_MIB + weights == pytest.approx(1106, abs=1)
    assert sizing.SAMPLER_MIB + weights == pytest.approx(844, abs=1)


def test_an_architecture_may_leave_out_what_follows_from_the_rest() -> None:
    plain = SMOLLM2.model_copy(update={"num_key_value_heads": None})
    assert (plain.num_kv_heads, plain.size_of_head) == (9, 64)
    assert SMOLLM2.model_copy(update={"head_dim": 32}).attention_width == 9 * 32


def test_what_is_not_fetched_is_unknown_and_the_rest_is_counted(tmp_path: Path) -> None:
    needed = estimate(config_of(source="nobody/nothing-of-this-name"), tmp_path)
    assert not needed.is_whole
    assert found(needed, "trainer", "weights").total_mib is None
    assert found(needed, "sampler", "rows").what == "32 rows"
    assert needed.host_mib == 2 * 151 + 148 + 96 + 140 + 560 + sizing.TRAINER_MIB + sizing.SAMPLER_MIB


def test_a_config_that_says_less_than_it_takes_is_unknown(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"hidden_size": 5}')
    assert not estimate(config_of(source=str(tmp_path)), tmp_path).is_whole


def test_a_multimodal_config_is_read_below_its_text(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(f'{{"text_config": {SMOLLM2.model_dump_json()}}}')
    needed = estimate(config_of(source=str(tmp_path), dtype="fp32"), tmp_path)
    assert found(needed, "trainer", "weights").each_mib == 134_515_008 * 4 / MIB


def test_smollm2_is_found_in_the_cache(tmp_path: Path) -> None:
    assert not estimate(config_of(source="smollm2"), tmp_path).is_whole
    directory = tmp_path / "models" / sizing.present.__globals__["_SMOLLM2_DIRECTORY"]
    directory.mkdir(parents=True)
    (directory / "config.json").write_text(SMOLLM2.model_dump_json())
    assert estimate(config_of(source="smollm2"), tmp_path).is_whole


def test_fake_engines_and_redis_and_a_joined_cluster_need_less(tmp_path: Path) -> None:
    tree: dict[str, object] = {"store": {"kind": "redis"}, "ray": {"address": "10.0.0.1:6379"}, "gateway": {"replicas": 1}}
    needed = estimate(config_of(tree, trainer={"engine": "fake"}, sampler={"engine": "fake"}), tmp_path)
    assert needed.is_whole
    assert needed.host_mib == 151 + 148 + 140 + 2 * sizing.FAKE_MIB
    assert memory_warning(config_of(tree), needed, machine_mib=1) is None


def test_what_lies_on_a_gpu_is_not_counted_as_the_machines(tiny_model: BaseModelInfo, tmp_path: Path) -> None:
    on_gpu = estimate(config_of(source=tiny_model.path, trainer={"num_gpus": 1}, sampler={"num_gpus": 1}), tmp_path)
    assert found(on_gpu, "trainer", "weights").place == "GPU"
    assert on_gpu.host_mib == 2 * 151 + 148 + 96 + 140 + 560 + sizing.TRAINER_MIB + sizing.SAMPLER_MIB


def test_too_much_is_a_warning_with_a_remedy(tmp_path: Path) -> None:
    config = config_of()
    needed = Estimate((Share("a", "process", 2, 1024.0), Share("b", "weights", 1, None)))
    assert memory_warning(config, needed, machine_mib=2048) is None
    assert memory_warning(config, needed, machine_mib=1024) == (
        "memory: at its fullest this configuration needs 2.0 GiB and the machine has 1.0; "
        "lower max_adapters, max_rows, max_context, micro_batch_tokens or replicas"
    )
