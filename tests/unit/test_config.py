"""Every shipped configuration loads; every fault names its field and ends with what to do."""

from pathlib import Path

import pytest
from pydantic import BaseModel, ValidationError

from tinsmith import config
from tinsmith.config import ConfigError, ServerConfig, load, validate

CONFIGS = sorted((Path(__file__).resolve().parents[2] / "configs").glob("*.yaml"))
MODEL = {"name": "org/model"}


def faults(**tree: object) -> list[str]:
    with pytest.raises(ConfigError) as caught:
        validate({"models": [MODEL], **tree})
    return caught.value.faults


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.stem)
def test_shipped_configurations_load_and_are_short(path: Path) -> None:
    assert load(path).models
    assert len(path.read_text().splitlines()) <= 15


def test_there_is_one_configuration_for_each_use() -> None:
    assert [path.stem for path in CONFIGS] == ["cpu", "fake", "gpu", "redis"]


def test_the_tree_is_frozen() -> None:
    with pytest.raises(ValidationError):
        validate({"models": [MODEL]}).gateway.port = 1  # type: ignore[misc]


def test_every_field_is_described() -> None:
    def undescribed(section: type[BaseModel], path: str) -> list[str]:
        found = []
        for name, field in section.model_fields.items():
            below = list(config._sections(field.annotation))
            found += [line for inner in below for line in undescribed(inner, f"{path}{name}.")]
            if not below and not field.description:
                found.append(path + name)
        return found

    assert undescribed(ServerConfig, "") == []


@pytest.mark.parametrize(
    ("tree", "expected"),
    [
        ({"gateway": {"host": "0.0.0.0"}}, "gateway.host: '0.0.0.0' is no loopback address, and a server without keys may not listen beyond it; use 127.0.0.1"),  # noqa: E501, S104
        ({"gateway": {"host": "example.org"}}, "gateway.host: 'example.org' is no loopback address, and a server without keys may not listen beyond it; use 127.0.0.1"),  # noqa: E501
        ({"gateway": {"port": 65536}}, "gateway.port: 65536 is too large; use 65535 or less"),
        ({"gateway": {"port": -1}}, "gateway.port: -1 is too small; use 0 or more"),
        ({"gateway": {"ingress": "nginx"}}, "gateway.ingress: 'nginx' is not one of 'direct' or 'serve'; choose one of them"),
        ({"gateway": {"ingress": "serve", "port": 0}}, "gateway: port 0 cannot be picked behind Ray Serve's proxy; name a port"),
        ({"gateway": {"replica": 2}}, "gateway.replica: no such field; did you mean 'replicas'?"),
        ({"keys": []}, "keys: no such field; remove it, or use one of checkpoints, execution, gateway, limits, logs, models, ray, store"),
        ({"execution": {"timeout_s": 0}}, "execution.timeout_s: 0 is too small; use more than 0.0"),
        ({"execution": {"long_poll_s": 41}}, "execution.long_poll_s: 41 is too large; use 40.0 or less"),
        ({"execution": {"threads": "many"}}, "execution.threads: 'many' does not fit (Input should be a valid integer, unable to parse string as an integer); mend the value"),  # noqa: E501
        ({"store": {"kind": "sqlite"}}, "store.kind: 'sqlite' is not one of 'memory' or 'redis'; choose one of them"),
        ({"store": {"url": "redis://h"}}, "store: url is for kind: redis; set kind: redis, or remove url"),
        ({"store": {"kind": "redis", "url": "http://me:secret@h"}}, "store.url: 'http://***@h' names no Redis; begin it with redis://, rediss:// or unix://"),  # noqa: E501
        ({"ray": {"num_cpus": 1}}, "config: ray.num_cpus 1 is too small for the workers; use 2 or more, or leave it out"),
        ({"ray": {"num_cpus": 8, "address": "a:1"}}, "config: ray.num_cpus is for a cluster that the server starts; remove it, or remove ray.address"),  # noqa: E501
        ({"models": []}, "models: empty; add at least 1 entry"),
        ({"models": [MODEL, MODEL]}, "config: models: two entries have the same name; give each base model its own"),
        ({"models": [{"name": "a b"}]}, "models.0.name: 'a b' cannot be used on the wire; use a hub id such as org/model-name"),
        ({"models": [{}]}, "models.0.name: missing; add it"),
        ({"models": [{**MODEL, "trainer": {"replcas": 1}}]}, "models.0.trainer.replcas: no such field; did you mean 'replicas'?"),
        ({"models": [{**MODEL, "max_context": 1}]}, "models.0.max_context: 1 is too small; use 2 or more"),
    ],
)  # fmt: skip
def test_a_fault_is_one_line_that_ends_with_the_remedy(tree: dict[str, object], expected: str) -> None:
    assert faults(**tree) == [expected]


@pytest.mark.proves("R56", "R4")
def test_all_faults_are_named_at_once() -> None:
    found = faults(store={"kind": "x"}, execution={"timeout_s": -1}, gateway={"host": "10.0.0.1", "port": 70_000})
    assert {line.split(":")[0] for line in found} == {"store.kind", "execution.timeout_s", "gateway.host", "gateway.port"}


def test_loopback_in_every_form_is_accepted() -> None:
    for host in ("127.0.0.1", "127.9.9.9", "::1", "localhost"):
        assert validate({"models": [MODEL], "gateway": {"host": host}}).gateway.host == host


def test_a_model_is_fake_only_where_nothing_needs_weights() -> None:
    def of(**model: object) -> bool:
        return validate({"models": [{**MODEL, **model}]}).models[0].is_fake

    fake = {"engine": "fake"}
    assert of(trainer=fake, sampler=fake)
    assert not of(trainer=fake, sampler=fake, source="smollm2")
    assert not of(trainer=fake)
    assert not of(sampler=fake)


def test_overrides_win_over_the_file(tmp_path: Path) -> None:
    path = tmp_path / "server.yaml"
    path.write_text("models: [{name: org/model}]\ngateway: {port: 1}\n")
    loaded = load(path, overrides={"gateway.port": 2, "store.kind": "redis"})
    assert (loaded.gateway.port, loaded.store.kind) == (2, "redis")


def test_an_override_below_a_malformed_section_leaves_the_fault_to_be_named(tmp_path: Path) -> None:
    path = tmp_path / "server.yaml"
    path.write_text("models: [{name: org/model}]\ngateway: 3\n")
    with pytest.raises(ConfigError, match="gateway: 3 does not fit"):
        load(path, overrides={"gateway.port": 2})


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("a: [", "not valid YAML"),
        ("- a", "the top level must be a mapping"),
        ("", "the top level must be a mapping"),
    ],
)
def test_a_file_that_is_no_tree_is_a_fault(tmp_path: Path, text: str, expected: str) -> None:
    path = tmp_path / "server.yaml"
    path.write_text(text)
    with pytest.raises(ConfigError, match=expected) as caught:
        load(path)
    assert len(caught.value.faults) == 1


def test_a_missing_file_is_a_fault(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="No such file"):
        load(tmp_path / "none.yaml")


def test_the_cache_can_be_moved(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("TINSMITH_CACHE", str(tmp_path))
    assert config.cache_dir() == tmp_path
    monkeypatch.delenv("TINSMITH_CACHE")
    assert config.cache_dir() == Path("~/.cache/tinsmith").expanduser()


def test_the_inherited_environment_is_a_copy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TINSMITH_CACHE", "x")
    copy = config.inherited_environment()
    copy["TINSMITH_CACHE"] = "y"
    assert config.inherited_environment()["TINSMITH_CACHE"] == "x"
