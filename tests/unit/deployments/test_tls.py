"""The gateway's port with a certificate."""

import ssl
import subprocess
from pathlib import Path
from socket import create_server

import httpx
import pytest
from fastapi import FastAPI

from tinsmith.config import ConfigError, validate
from tinsmith.deployments.gateway import HttpServer
from tinsmith.deployments.ports import url_of
from tinsmith.deployments.preflight import faults_of, warnings_of
from tinsmith.deployments.tls import Tls, check_tls, tls_of


@pytest.fixture(scope="module")
def tls(tmp_path_factory: pytest.TempPathFactory) -> Tls:
    """A certificate of its own for 127.0.0.1."""
    directory = tmp_path_factory.mktemp("tls")
    return made(directory / "cert.pem", directory / "key.pem")


def made(cert: Path, key: Path) -> Tls:
    options = "req -x509 -newkey ec -pkeyopt ec_paramgen_curve:prime256v1 -nodes -days 1 -subj /CN=test -addext subjectAltName=IP:127.0.0.1"
    subprocess.run(["openssl", *options.split(), "-keyout", str(key), "-out", str(cert)], check=True, capture_output=True)
    return Tls(cert, key)


async def test_the_port_speaks_https_alone(tls: Tls) -> None:
    app = FastAPI()

    @app.get("/")
    async def root() -> str:
        return "here"

    listener = create_server(("127.0.0.1", 0))
    listener.setblocking(False)
    server = HttpServer(app, listener, lambda: None, tls)
    port = listener.getsockname()[1]
    await server.start()
    try:
        trusting = ssl.create_default_context(cafile=tls.cert)
        async with httpx.AsyncClient(verify=trusting) as http:
            assert (await http.get(url_of("127.0.0.1", port, is_tls=True))).json() == "here"
        async with httpx.AsyncClient() as http:
            with pytest.raises(httpx.HTTPError):
                await http.get(url_of("127.0.0.1", port))
    finally:
        await server.stop()


def config_of(directory: Path, **gateway: object) -> dict[str, object]:
    return {
        "models": [{"name": "org/model"}],
        "auth": {"mode": "keys", "keys_file": str(directory / "keys.json")},
        "gateway": {"port": 0, **gateway},
        "checkpoints": {"dir": str(directory / "checkpoints")},
    }


def test_a_sound_pair_of_files_is_no_fault(tls: Tls, tmp_path: Path) -> None:
    sound = validate(config_of(tmp_path, host="0.0.0.0", tls_cert=str(tls.cert), tls_key=str(tls.key)))  # noqa: S104
    assert tls_of(sound.gateway) == tls
    assert faults_of(sound) == []
    assert any("beyond loopback, on 0.0.0.0:0" in warning for warning in warnings_of(sound))
    assert not any("in the clear" in warning for warning in warnings_of(sound))
    assert any("in the clear" in warning for warning in warnings_of(validate(config_of(tmp_path, host="0.0.0.0"))))  # noqa: S104
    assert not any("in the clear" in warning for warning in warnings_of(validate(config_of(tmp_path))))


def test_files_that_cannot_be_used_are_named(tls: Tls, tmp_path: Path) -> None:
    other = made(tmp_path / "cert.pem", tmp_path / "key.pem")
    locked = tmp_path / "locked.pem"
    subprocess.run(
        ["openssl", "pkcs8", "-topk8", "-v2", "aes-256-cbc", "-passout", "pass:word", "-in", str(tls.key), "-out", str(locked)],
        check=True,
        capture_output=True,
    )
    for cert, key, said in (
        (tls.cert, tmp_path / "none", "gateway.tls_key"),
        (tls.cert, other.key, "gateway.tls_cert"),
        (tls.key, tls.key, "gateway.tls_cert"),
        (tls.cert, locked, "the key has a passphrase"),
    ):
        with pytest.raises(ConfigError, match=said) as caught:
            check_tls(Tls(cert, key))
        assert ";" in caught.value.faults[0]


@pytest.mark.parametrize(
    ("gateway", "said"),
    [({"tls_cert": "a.pem"}, "belong together"), ({"tls_cert": "a", "tls_key": "b", "ingress": "serve"}, "speaks no TLS")],
)
def test_half_a_pair_and_a_proxy_are_refused(tmp_path: Path, gateway: dict[str, object], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        validate(config_of(tmp_path, **gateway | ({"port": 8700} if "ingress" in gateway else {})))


def test_a_damaged_file_of_keys_is_a_fault(tmp_path: Path) -> None:
    (tmp_path / "keys.json").write_text("nonsense")
    [fault] = faults_of(validate(config_of(tmp_path)))
    assert fault.startswith("auth.keys_file: ")
