"""What a server finds again: the whole of it stopped and started on the same Redis and storage, and on a Redis that was emptied."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import tinker
from tinker import types

from tests.fakes.in_process import BASE, serve
from tests.fakes.s3_server import BUCKET, S3Server
from tests.redis_server import RedisServer
from tests.server_process import ServerProcess, fake_config
from tinsmith.lifecycle.checkpoints import Checkpoints
from tinsmith.lifecycle.directory_storage import DirectoryStorage

MODEL = "HuggingFaceTB/SmolLM2-135M-Instruct"
NAME = "same-name"
PROMPT = types.ModelInput.from_ints([1, 2, 3])
GREEDY = types.SamplingParams(max_tokens=6, temperature=0.0)
RESULT_S = 60

# The SDK leaves connections open when its clients are closed; whoever is collecting garbage then hears of it.
pytestmark = pytest.mark.filterwarnings("ignore:unclosed:ResourceWarning")


@contextmanager
def clients_of(url: str) -> Iterator[tuple[tinker.ServiceClient, tinker.RestClient]]:
    client = tinker.ServiceClient(base_url=url, api_key="tml-local")
    rest = tinker.RestClient(base_url=url, api_key="tml-local")
    yield client, rest
    rest.holder.close()
    client.close("success").result(RESULT_S)


def trained(client: tinker.ServiceClient, base: str = MODEL) -> tinker.TrainingClient:
    """A model that has taken two steps."""
    training = client.create_lora_training_client(base, rank=4, seed=1).result(RESULT_S)
    datum = types.Datum(
        model_input=PROMPT,
        loss_fn_inputs={"target_tokens": [2, 3, 4], "weights": [1.0, 1.0, 1.0]},  # type: ignore[dict-item]
    )
    for _ in range(2):
        training.forward_backward([datum], "cross_entropy").result(RESULT_S)
        training.optim_step(types.AdamParams(learning_rate=0.1)).result(RESULT_S)
    return training


def sampled(client: tinker.ServiceClient, path: str) -> list[int]:
    sampler = client.create_sampling_client(model_path=path).result(RESULT_S)
    return list(sampler.sample(PROMPT, num_samples=1, sampling_params=GREEDY).result(RESULT_S).sequences[0].tokens)


def resaved(client: tinker.ServiceClient, path: str) -> list[int]:
    """What the model that goes on from a training checkpoint samples."""
    training = client.create_training_client_from_state_with_optimizer(path).result(RESULT_S)
    return sampled(client, training.save_weights_for_sampler("again").result(RESULT_S).path)


def paths_of(rest: tinker.RestClient) -> set[str]:
    return {checkpoint.tinker_path for checkpoint in rest.list_user_checkpoints().result(RESULT_S).checkpoints}


def test_a_restart_finds_everything_and_an_emptied_store_leaves_the_files_alone(tmp_path: Path) -> None:
    files = Checkpoints(DirectoryStorage(tmp_path))
    with RedisServer() as redis:
        config = fake_config(tmp_path, redis.url)
        with ServerProcess.start(config) as server, clients_of(server.url) as (client, rest):
            training = trained(client)
            state, weights = training.save_state(NAME).result(RESULT_S).path, training.save_weights_for_sampler(NAME).result(RESULT_S).path
            tokens = sampled(client, weights)
            assert (paths_of(rest), resaved(client, state)) == ({state, weights}, tokens)
        with ServerProcess.start(config) as server, clients_of(server.url) as (client, rest):
            assert {state, weights} < paths_of(rest)
            assert (sampled(client, weights), resaved(client, state)) == (tokens, tokens)
        stored = {artifact: files.read(artifact) for artifact in files.artifacts()}
        redis.stop()
    with RedisServer() as redis, ServerProcess.start(fake_config(tmp_path, redis.url)) as server, clients_of(server.url) as (client, rest):
        assert paths_of(rest) == set()
        with pytest.raises(tinker.NotFoundError):
            sampled(client, weights)
        trained(client).save_state(NAME).result(RESULT_S)
        assert {artifact: files.read(artifact) for artifact in stored} == stored


def test_a_server_over_an_object_store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with S3Server() as objects:
        for name, value in objects.environment.items():
            monkeypatch.setenv(name, value)
        options = {"endpoint_url": objects.url, "addressing": "path", "region": "us-east-1"}
        with (
            serve(tmp_path, checkpoints={"url": f"s3://{BUCKET}/here", "options": options}) as server,
            clients_of(server.url) as (client, rest),
        ):
            training = trained(client, BASE)
            state, weights = training.save_state(NAME).result(RESULT_S).path, training.save_weights_for_sampler(NAME).result(RESULT_S).path
            assert sampled(client, weights) == resaved(client, state)
            rest.delete_checkpoint_from_tinker_path(weights).result(RESULT_S)
            assert weights not in paths_of(rest)
        assert all(key.startswith("here/local/") for key in objects.keys)
        assert sum(key.endswith("manifest.json") for key in objects.keys) == 3
    assert list(tmp_path.iterdir()) == []
