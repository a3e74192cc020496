"""The certificate that the gateway's port shows, and whether it can be used here. Knows nothing of HTTP."""

import ssl
from dataclasses import dataclass
from pathlib import Path

from tinsmith.config import ConfigError, GatewayConfig


@dataclass(frozen=True, slots=True)
class Tls:
    """Files in PEM: a certificate with its chain, and its private key without a passphrase."""

    cert: Path
    key: Path


def tls_of(config: GatewayConfig) -> Tls | None:
    """None where the port speaks plain http."""
    if config.tls_cert is None or config.tls_key is None:
        return None
    return Tls(config.tls_cert.expanduser(), config.tls_key.expanduser())


def check_tls(tls: Tls) -> None:
    """Raises ConfigError where the files cannot be read, or do not belong together."""
    faults = [f"gateway.{name}: {path} is no file; name one in PEM" for name, path in _fields(tls) if not path.is_file()]
    if faults:
        raise ConfigError(faults)
    try:
        ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER).load_cert_chain(tls.cert, tls.key, password=_refuse_passphrase)
    except (OSError, ValueError) as error:  # ssl.SSLError is an OSError
        said = " ".join(str(error).split())[:200]
        raise ConfigError(
            [f"gateway.tls_cert: {tls.cert} and {tls.key} cannot be used ({said}); name a certificate and its own key, both in PEM"]
        ) from error


def _fields(tls: Tls) -> tuple[tuple[str, Path], ...]:
    return ("tls_cert", tls.cert), ("tls_key", tls.key)


def _refuse_passphrase() -> str:
    """OpenSSL would ask for one at the terminal."""
    raise ValueError("the key has a passphrase")
