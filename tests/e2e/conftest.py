"""The server as users start it, with SmolLM2 in fp32: once on the memory store, once on Redis."""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load as load_safetensors

from tests.e2e.lessons import SMOLLM2
from tests.redis_server import RedisServer
from tests.server_process import ServerProcess
from tinsmith.config import cache_dir
from tinsmith.engines.models import resolve
from tinsmith.engines.peft_engine import PeftEngine
from tinsmith.lifecycle.checkpoints import ArtifactKind, Checkpoints
from tinsmith.lifecycle.directory_storage import DirectoryStorage
from tinsmith.protocol.sessions import BaseModelInfo
from tinsmith.state.catalog import split_path

MAX_CHUNK_LEN = 4  # datums of one request, so that a call of ten splits into three
Weights = dict[str, "np.ndarray[tuple[int, ...], np.dtype[np.float32]]"]


@dataclass
class Stack:
    """A running server, the Redis behind it (None: the memory store), and the directory of its checkpoints."""

    server: ServerProcess
    redis: RedisServer | None
    checkpoints: Path

    def kill(self, role: str) -> None:
        """kill -9 of one replica."""
        self.server.kill(role)

    def files(self, path: str) -> dict[str, bytes]:
        """The files of a checkpoint of the newest save under this path's run and kind."""
        run_id, kind, _ = split_path(path)
        store = Checkpoints(DirectoryStorage(self.checkpoints))
        prefix = f"local/{run_id.replace(':', '=3A')}/{ArtifactKind(kind)}/"
        artifacts = [artifact for artifact in store.artifacts() if artifact.startswith(prefix)]
        return store.read(max(artifacts, key=lambda artifact: int(artifact.rsplit("/", 1)[1].split("-")[0])))

    def lora_b(self, path: str) -> Weights:
        return lora_b(self.files(path))


def lora_b(files: dict[str, bytes]) -> Weights:
    """The B matrices of an adapter, by module."""
    tensors = load_safetensors(files["adapter_model.safetensors"])
    return {name: tensor.astype(np.float32) for name, tensor in tensors.items() if "lora_B" in name}


@pytest.fixture(scope="session", params=["memory", "redis"])
def stack(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    checkpoints = tmp_path_factory.mktemp("checkpoints")
    config: dict[str, object] = {
        "models": [{"name": SMOLLM2, "source": "smollm2", "dtype": "fp32"}],
        "gateway": {"max_chunk_len": MAX_CHUNK_LEN},
        "checkpoints": {"dir": str(checkpoints)},
    }
    if request.param == "memory":
        with ServerProcess.start(config) as server:
            yield Stack(server, None, checkpoints)
        return
    with RedisServer() as redis, ServerProcess.start(config | {"store": {"kind": "redis", "url": redis.url}}) as server:
        yield Stack(server, redis, checkpoints)


@pytest.fixture(scope="session")
def smollm2() -> BaseModelInfo:
    return resolve("smollm2", SMOLLM2, cache_dir())


@pytest.fixture(scope="session")
def engine(smollm2: BaseModelInfo) -> PeftEngine:
    return PeftEngine(smollm2, dtype="fp32", max_adapters=4, micro_batch_tokens=4096)
