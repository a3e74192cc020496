"""A Serve application that runs `tinsmith serve` on a cluster that somebody else manages, such as a KubeRay RayService.

    import_path: tinsmith.deployments.rayservice:build
    args: {config: /etc/tinsmith/server.yaml}

Its one replica keeps the command as a child, which joins the cluster (`ray.address: auto`) and starts the server's own applications. Where
the child ends, the replica says that it is unhealthy and Serve starts another one. Knows nothing of what the server does.
"""

import asyncio
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from ray import serve
from ray.serve import Application

from tinsmith.config import ConfigError, load

STOP_S = 15.0  # the command promises to end within 10
_SERVE = (sys.executable, "-m", "tinsmith.cli", "serve")


class ServerEnded(RuntimeError):
    """The command has ended by itself; its log says why."""


class Launch:
    """`command` runs until `stop`. Serve calls `check_health` now and then, and awaits `stop` as it stops the replica."""

    def __init__(self, command: Sequence[str]) -> None:
        self._child = subprocess.Popen(command)  # noqa: S603 - our own command, no shell

    async def check_health(self) -> None:
        """Raises ServerEnded."""
        code = self._child.poll()
        if code is not None:
            raise ServerEnded(f"tinsmith serve ended with exit code {code}; its log has the reason")

    async def stop(self) -> None:
        """End the command in order; kill it where it does not."""
        self._child.terminate()
        try:
            await asyncio.to_thread(self._child.wait, STOP_S)
        except subprocess.TimeoutExpired:
            self._child.kill()
            await asyncio.to_thread(self._child.wait)


def command_of(args: Mapping[str, str]) -> list[str]:
    """What to run. Raises ConfigError for a configuration that would not join a cluster."""
    config = Path(args.get("config", ""))
    if load(config).ray.address is None:
        raise ConfigError([f"{config}: ray.address is missing, so the server would start a cluster of its own; set it to auto"])
    return [*_SERVE, str(config)]


def build(args: dict[str, str]) -> Application:
    """The application. Raises ConfigError."""
    kind = type("Launch", (Launch,), {"__del__": Launch.stop})  # Serve awaits a method of that name as it stops a replica
    deployment = serve.deployment(kind).options(
        name="launch", num_replicas=1, ray_actor_options={"num_cpus": 0}, graceful_shutdown_timeout_s=STOP_S + 5
    )
    return deployment.bind(command_of(args))
