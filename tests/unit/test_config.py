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


def test_a_server_with_keys_may_listen_anywhere() -> None:
    keys = {"mode": "keys", "keys_file": "keys.json"}
    for host in ("0.0.0.0", "::", "10.1.2.3", "localhost"):  # noqa: S104
        assert validate({"models": [MODEL], "auth": keys, "gateway": {"host": host}}).gateway.host == host
    with pytest.raises(ValidationError, match="beyond loopback"):
        ServerConfig(models=({"name": "org/model"},), gateway=config.GatewayConfig(host="10.1.2.3"))  # type: ignore[arg-type]


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
        ({"gateway": {"host": "0.0.0.0"}}, "gateway.host: '0.0.0.0' is no loopback address, and a server without keys may not listen beyond it; use 127.0.0.1, or set auth.mode: keys"),  # noqa: E501, S104
        ({"gateway": {"host": "example.org"}}, "gateway.host: 'example.org' is no loopback address, and a server without keys may not listen beyond it; use 127.0.0.1, or set auth.mode: keys"),  # noqa: E501
        ({"gateway": {"port": 65536}}, "gateway.port: 65536 is too large; use 65535 or less"),
        ({"gateway": {"port": -1}}, "gateway.port: -1 is too small; use 0 or more"),
        ({"gateway": {"ingress": "nginx"}}, "gateway.ingress: 'nginx' is not one of 'direct' or 'serve'; choose one of them"),
        ({"gateway": {"ingress": "serve", "port": 0}}, "gateway: port 0 cannot be picked behind Ray Serve's proxy; name a port"),
        ({"gateway": {"replica": 2}}, "gateway.replica: no such field; did you mean 'replicas'?"),
        ({"auth": {"mode": "keys"}}, "config: auth.keys_file: missing, and the memory store forgets its keys with every stop; name a file, or set store.kind: redis"),  # noqa: E501
        ({"auth": {"mode": "keys", "keys_file": "k"}, "store": {"kind": "redis"}}, "config: auth.keys_file is for store.kind: memory, since Redis holds the keys itself; remove it"),  # noqa: E501
        ({"auth": {"jwt": False}}, "auth: jwt is for mode: keys; set mode: keys, or remove jwt"),
        ({"auth": {"mode": "keys", "keys_file": "k", "jwt_life_s": 60}}, "auth.jwt_life_s: 60 is too small; use 120.0 or more"),
        ({"auth": {"mode": "keys", "keys_file": "k", "operators": ["a/b"]}}, "auth.operators.0: 'a/b' is no tenant; use 1-64 letters, digits, '.', '_' or '-', a letter or digit first"),  # noqa: E501
        ({"auth": {"mode": "keys", "keys_file": "/"}}, "auth.keys_file: '/' names no file; name one"),
        ({"auth": {"mode": "keys", "keys_file": "k"}, "gateway": {"host": "a b"}}, "gateway.host: 'a b' is no address to listen on; write an IP address, such as 0.0.0.0"),  # noqa: E501
        ({"gateway": {"tls_cert": "cert.pem"}}, "gateway: tls_cert and tls_key belong together; set both, or neither"),
        ({"keys": []}, "keys: no such field; remove it, or use one of auth, checkpoints, execution, gateway, limits, logs, models, ray, store, telemetry"),  # noqa: E501
        ({"execution": {"timeout_s": 0}}, "execution.timeout_s: 0 is too small; use more than 0.0"),
        ({"execution": {"long_poll_s": 41}}, "execution.long_poll_s: 41 is too large; use 40.0 or less"),
        ({"execution": {"inline_wait_s": 5, "long_poll_s": 5}}, "execution: inline_wait_s 5 is not below long_poll_s 5; lower it"),
        ({"limits": {"requests_per_s": -1}}, "limits.requests_per_s: -1 is too small; use 0.0 or more"),
        ({"telemetry": {"otlp_endpoint": "collector:4318"}}, "telemetry.otlp_endpoint: 'collector:4318' names no collector; write http://HOST:PORT or https://HOST:PORT"),  # noqa: E501
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
        ({"models": None}, "models: None is no list; write its entries below it, each after a dash"),
        ({"models": [{"name": 200 * "a"}, {"name": 201 * "a"}]}, "models.1.name: 201 characters are too many; use 200 or fewer"),
        ({"models": [{**MODEL, "source": ""}]}, "models.0.source: empty; name one, or leave it out"),
        ({"models": [{**MODEL, "source": "~no such user/x"}]}, "models.0.source: '~no such user/x' names an unknown user; write the path out"),  # noqa: E501
        ({"models": [{**MODEL, "trainer": {"num_gpus": 1.5}}]}, "models.0.trainer.num_gpus: 1.5 is no whole number; above 1 use one"),
        ({"models": [{**MODEL, "sampler": {"num_gpus": 0.00001}}]}, "models.0.sampler.num_gpus: 1e-05 is too fine; use 4 decimals or fewer"),  # noqa: E501
        ({"checkpoints": {"dir": "~no such user/x"}}, "checkpoints.dir: '~no such user/x' names an unknown user; write the path out"),
        ({"checkpoints": {"dir": "a\0b"}}, "checkpoints.dir: 'a\\x00b' is no path; remove the null character"),
        ({"execution": {"timeout_s": float("inf")}}, "execution.timeout_s: inf does not fit (Input should be a finite number); mend the value"),  # noqa: E501
        ({"execution": {"queue_timeout_s": 1e300}}, "execution.queue_timeout_s: 1e+300 is too large; use 31622400.0 or less"),
        ({"execution": {"lease_s": 0.01}}, "execution.lease_s: 0.01 is too small; use 0.1 or more"),
        ({"gateway": {1: 2}}, "gateway.1: no such field: a name must be text; remove it"),
        ({"gateway": None}, "gateway: None is no section; write its fields below it, or leave it out"),
        ({"gateway": {"allowed_hosts": []}}, "gateway.allowed_hosts: empty; add at least 1 entry"),
        ({"ray": {"address": ""}}, "ray.address: '' names no cluster; write auto, or HOST:PORT"),
        ({"checkpoints": {"dir": " "}}, "checkpoints.dir: empty; name a directory, or leave it out"),
        ({"checkpoints": {"dir": "d", "url": "s3://bucket"}}, "checkpoints: dir and url are two places for the same files; keep one of them"),  # noqa: E501
        ({"checkpoints": {"options": {"region": "r"}}}, "checkpoints: options are those of an object store; set url, or remove options"),
        ({"checkpoints": {"url": "s3://key:secret@bucket/p"}}, "checkpoints.url: 's3://***@bucket/p' names no place in an object store; write s3://BUCKET/PREFIX, keys into the environment"),  # noqa: E501
        ({"checkpoints": {"url": "memory://bucket"}}, "checkpoints.url: 'memory://bucket' names no place in an object store; write s3://BUCKET/PREFIX, keys into the environment"),  # noqa: E501
        ({"checkpoints": {"url": "s3://bucket/../other"}}, "checkpoints.url: 's3://bucket/../other' names no place in an object store; write s3://BUCKET/PREFIX, keys into the environment"),  # noqa: E501
        ({"checkpoints": {"url": "s3://bucket", "options": {"secret": "planted"}}}, "checkpoints.options.secret: no such field; remove it, or use one of addressing, endpoint_url, region"),  # noqa: E501
        ({"checkpoints": {"url": "s3://bucket", "options": {"endpoint_url": "http://me:secret@h"}}}, "checkpoints.options.endpoint_url: 'http://***@h' names no object store; write http://HOST:PORT or https://HOST:PORT, keys into the environment"),  # noqa: E501
        ({"execution": {"long_poll_s": True}}, "execution.long_poll_s: true is no number; write one"),
        ({"ray": {"num_cpus": False}}, "ray.num_cpus: false is no number; write one"),
        ({"telemetry": {"metrics": 1}}, "telemetry.metrics: 1 is neither true nor false; write one of them"),
        ({"models": [{**MODEL, "max_context": 1}]}, "models.0.max_context: 1 is too small; use 2 or more"),
    ],
)  # fmt: skip
def test_a_fault_is_one_line_that_ends_with_the_remedy(tree: dict[str, object], expected: str) -> None:
    assert faults(**tree) == [expected]


@pytest.mark.parametrize(
    ("url", "fault"),
    [
        ("http://me:sec/ret@word@h", "'http://***@h' names no Redis"),
        ("redis://me:secret@h:port", "'redis://***@h:port' names no port from 1 to 65535 of a host"),
        ("redis://h:65536", "names no port from 1 to 65535 of a host"),
        ("redis://h:0", "names no port from 1 to 65535 of a host"),
        ("redis://[::1", "names no port from 1 to 65535 of a host"),
        ("redis://h/first", "names no database"),
        ("redis://h/0?db=first", "names no database"),
        ("redis://h/0?socket_timeout=9", "'socket_timeout' is no option of a Redis URL here"),
        ("redis://h/0?decode_responses=true", "'decode_responses' is no option of a Redis URL here"),
    ],
)
def test_a_redis_url_that_cannot_be_used_is_a_fault_and_shows_no_password(url: str, fault: str) -> None:
    (line,) = faults(store={"kind": "redis", "url": url})
    assert fault in line
    assert "secret" not in line
    assert "word" not in line


def test_redis_urls_in_every_form_are_accepted() -> None:
    for url in ("redis://h", "redis://h/", "redis://u:p@h:1/3", "unix:///run/redis.sock?db=2", "rediss://[::1]:1/0?ssl_ca_certs=/ca.pem"):
        assert validate({"models": [MODEL], "store": {"kind": "redis", "url": url}}).store.url == url


@pytest.mark.parametrize(
    "url", ["", "http://", "http:///traces", "http://:4318", "http://h:0", "http://h:65536", "http://[::1", "http://a b", "ftp://h"]
)
def test_an_endpoint_without_a_host_is_a_fault(url: str) -> None:
    assert faults(telemetry={"otlp_endpoint": url}) == [
        f"telemetry.otlp_endpoint: {url!r} names no collector; write http://HOST:PORT or https://HOST:PORT"
    ]


def test_a_faulty_endpoint_shows_no_password() -> None:
    (line,) = faults(telemetry={"otlp_endpoint": "http://me:secret@h:port"})
    assert "'http://***@h:port'" in line


@pytest.mark.parametrize("address", ["nope:::", "nope", "h:0", "h:65536", ":6379", "ray://h:10001", "a b:1"])
def test_an_address_that_names_no_cluster_is_a_fault(address: str) -> None:
    assert faults(ray={"address": address}) == [f"ray.address: {address!r} names no cluster; write auto, or HOST:PORT"]


def test_endpoints_and_addresses_in_every_form_are_accepted() -> None:
    for url in ("http://h:4318", "https://collector.example/v1", "http://[::1]:4318"):
        assert validate({"models": [MODEL], "telemetry": {"otlp_endpoint": url}}).telemetry.otlp_endpoint == url
    for address in ("auto", "10.0.0.1:6379", "ray-head.default.svc:6379", "[::1]:6379"):
        assert validate({"models": [MODEL], "ray": {"address": address}}).ray.address == address


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
    with pytest.raises(ConfigError, match="gateway: 3 is no section"):
        load(path, overrides={"gateway.port": 2})


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("a: [", "not valid YAML"),
        ("- a", "the top level must be a mapping"),
        ("", "the top level must be a mapping"),
        ("a: 2020-99-99", "not valid YAML"),
        ("[" * 20_000, "nested too deep"),
        ("a: \xe9", "not text in UTF-8"),
    ],
)
def test_a_file_that_is_no_tree_is_a_fault(tmp_path: Path, text: str, expected: str) -> None:
    path = tmp_path / "server.yaml"
    path.write_text(text, encoding="latin-1")
    with pytest.raises(ConfigError, match=expected) as caught:
        load(path)
    assert len(caught.value.faults) == 1


def test_every_repeated_key_is_a_fault_with_its_line(tmp_path: Path) -> None:
    path = tmp_path / "server.yaml"
    path.write_text(
        "gateway: {port: 1}\nmodels:\n  - name: a/b\n    'name': c/d\ngateway: {port: 2, port: 3}\nlogs: &l\n  level: INFO\nx: *l\n"
    )
    with pytest.raises(ConfigError) as caught:
        load(path)
    assert caught.value.faults == [
        f"{path}: line 4: 'name' is there already, on line 3; keep one of the two",
        f"{path}: line 5: 'gateway' is there already, on line 1; keep one of the two",
        f"{path}: line 5: 'port' is there already, on line 5; keep one of the two",
    ]


def test_a_key_that_overrides_a_merged_one_is_no_repeat(tmp_path: Path) -> None:
    path = tmp_path / "server.yaml"
    path.write_text("models:\n  - &m {name: a/b, max_context: 8}\n  - {<<: *m, name: c/d}\n")
    assert [(model.name, model.max_context) for model in load(path).models] == [("a/b", 8), ("c/d", 8)]


def test_a_tree_that_aliases_make_huge_is_named_and_not_printed(tmp_path: Path) -> None:
    path = tmp_path / "server.yaml"
    levels = [f"a{level}: &a{level} [{', '.join([f'*a{level - 1}'] * 9)}]" for level in range(1, 12)]
    path.write_text("\n".join(["a0: &a0 [x]", *levels, "models: [{name: org/model}]", "gateway: {port: *a11}"]))
    with pytest.raises(ConfigError) as caught:
        load(path)
    (line,) = (line for line in caught.value.faults if line.startswith("gateway.port: [["))
    assert len(line) < 200


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
