"""The environment in which the server's processes run. Ray and the numeric libraries read theirs while they are imported or started, so
it must stand before either is: `tinsmith serve` sets it and then replaces its own process. Imports neither.
"""

import secrets
from collections.abc import Mapping

from tinsmith.config import ServerConfig

_TOKEN = "RAY_AUTH_TOKEN"  # noqa: S105 - the name of a variable
_TOKEN_PATH = "RAY_AUTH_TOKEN_PATH"  # noqa: S105

# Ours to decide, whatever the caller's environment says.
_FORCED = {
    "RAY_AUTH_MODE": "token",  # Ray listens on every interface
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_SERVE_RUN_USER_CODE_IN_SEPARATE_THREAD": "1",  # Serve's own calls must not wait behind a long validation in a gateway
    "TOKENIZERS_PARALLELISM": "false",
}
# Defaults that the caller's environment may change.
_DEFAULTS = {
    "RAY_DEDUP_LOGS": "0",  # equal lines of two replicas are two lines
    "RAY_COLOR_PREFIX": "0",
    "HF_HUB_DISABLE_PROGRESS_BARS": "1",  # nobody watches a worker's log
    "RAY_enable_metrics_collection": "0",  # its ports answer without a token
}


def serving_environment(config: ServerConfig, inherited: Mapping[str, str]) -> dict[str, str]:
    """`inherited` with what the server's processes need. A cluster that we start gets a random token, unless one is given."""
    environment = _DEFAULTS | dict(inherited) | _FORCED
    if not (inherited.get(_TOKEN) or inherited.get(_TOKEN_PATH)):
        environment[_TOKEN] = secrets.token_hex(32)
    threads = str(config.execution.threads)
    return environment | {"OMP_NUM_THREADS": threads, "MKL_NUM_THREADS": threads, "OPENBLAS_NUM_THREADS": threads}
