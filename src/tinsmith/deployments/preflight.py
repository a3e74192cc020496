"""What can be known to fail, or to surprise, before anything is started on this machine."""

import asyncio
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil

from tinsmith.config import ConfigError, ServerConfig
from tinsmith.config_checks import is_loopback
from tinsmith.deployments.observation import missing_packages
from tinsmith.deployments.ports import PortUnavailable, reserve
from tinsmith.deployments.tls import check_tls, tls_of
from tinsmith.lifecycle.checkpoints import Checkpoints
from tinsmith.protocol.errors import StateContention
from tinsmith.state.key_file import FileKeyring
from tinsmith.state.redis_store import RedisStore

_RAY_PORTS = (
    "ray: these ports listen on every interface: gcs_server, raylet, object manager, agents and one or two of each worker process (random "
    "numbers; calls need the token), and the metrics ports 44217 and 44227 (no token); use a firewall or a private network"
)
_MEMORY_STORE = (
    "the memory store does not survive a restart: sessions, models and pending work end with the server; store.kind: redis keeps them"
)
_CLEAR_TEXT = "API keys cross the network in the clear; set gateway.tls_cert and gateway.tls_key, or end TLS in front of the port"
_MIN_SILENCE_S = 15.0


def faults_of(config: ServerConfig) -> list[str]:
    """Lines, each with its remedy; none if the server can start here."""
    probes: list[Callable[[ServerConfig], None]] = [
        _probe_port,
        _probe_tls,
        _probe_keys,
        _probe_checkpoints,
        _probe_sources,
        _probe_store,
        _probe_tracing,
    ]
    faults: list[str] = []
    for probe in probes:
        try:
            probe(config)
        except ConfigError as error:
            faults.extend(error.faults)
    return faults


def warnings_of(config: ServerConfig) -> list[str]:
    """What an operator should know: ports beyond loopback, settings that are legal and rarely meant."""
    warnings = []
    if config.ray.address is None:
        warnings.append(_RAY_PORTS)
    if config.gateway.ingress == "serve":
        warnings.append(f"gateway: Ray Serve's proxy listens on {config.gateway.host}:{config.gateway.port} of every node")
    elif not is_loopback(config.gateway.host):
        warnings.append(f"gateway: it listens beyond loopback, on {config.gateway.host}:{config.gateway.port} of every node")
    if not is_loopback(config.gateway.host) and config.gateway.tls_cert is None:
        warnings.append(f"gateway: {_CLEAR_TEXT}")
    if config.store.kind == "memory":
        warnings.append(f"store: {_MEMORY_STORE}")
    silence_s = config.execution.session_timeout_s
    if silence_s < _MIN_SILENCE_S:
        warnings.append(f"execution.session_timeout_s: {silence_s:g} s can end a session between two beats of its client (10 s); raise it")
    return warnings


def machine_mib() -> float:
    """Memory of this machine, in MiB."""
    return psutil.virtual_memory().total / (1024 * 1024)


def _probe_port(config: ServerConfig) -> None:
    if config.gateway.ingress == "serve" and config.ray.address is not None:
        return  # the proxies of that cluster may listen there already
    try:
        reserve(config.gateway.host, config.gateway.port).close()
    except PortUnavailable as error:
        raise ConfigError([str(error)]) from error


def _probe_tls(config: ServerConfig) -> None:
    tls = tls_of(config.gateway)
    if tls is not None:
        check_tls(tls)


def _probe_keys(config: ServerConfig) -> None:
    if config.auth.keys_file is None:
        return
    try:
        asyncio.run(FileKeyring(config.auth.keys_file).records())
    except StateContention as error:
        raise ConfigError([error.message]) from error


def _probe_checkpoints(config: ServerConfig) -> None:
    Checkpoints.open(config.checkpoints).probe()


def _probe_sources(config: ServerConfig) -> None:
    """A source that can only be a directory must be one, and a directory must hold a model; hub ids are not looked up here."""
    sources = [(index, model.source) for index, model in enumerate(config.models) if model.source is not None]
    faults = [f"models.{index}.source: {source} {fault}" for index, source in sources for fault in _faults_of_source(source)]
    if faults:
        raise ConfigError(faults)


def _faults_of_source(source: str) -> Iterator[str]:
    directory = Path(source).expanduser()
    if "/" in source and directory.is_dir():
        if not (directory / "config.json").is_file():
            yield "holds no config.json; name the directory of a model, 'smollm2', or a hub id"
    elif source.startswith(("/", "~", "./", "../")) or source.count("/") > 1:
        yield "is no directory; name one that holds a model, 'smollm2', or a hub id"


def _probe_store(config: ServerConfig) -> None:
    if config.store.kind == "redis":
        asyncio.run(_probe_redis(config.store.url))


def _probe_tracing(config: ServerConfig) -> None:
    missing = missing_packages() if config.telemetry.otlp_endpoint is not None else []
    if missing:
        raise ConfigError([f"telemetry.otlp_endpoint: traces need {', '.join(missing)}; pip install 'tinsmith[tracing]', or leave it out"])


async def _probe_redis(url: str) -> None:
    """Raises ConfigError for a server that is away, unfit, or holds a newer schema."""
    store = RedisStore(url)
    try:
        await store.open()
    except StateContention as error:
        raise ConfigError([f"store.url: {error.message}"]) from error
    finally:
        await store.close()
