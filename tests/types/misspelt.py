"""One misspelt argument a line: `mypy --strict` flags each, and when run each fails before any request is sent."""

import sys
from collections.abc import Callable
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from tests.fakes.native_server import URL, NativeServer
from tinsmith.client import AdamWConfig, Client, LrSchedule, SamplingClient, TrainingClient


def mistakes(client: Client, training: TrainingClient, sampler: SamplingClient) -> list[Callable[[], object]]:
    return [
        lambda: Client(URL, apikey="tml-local"),  # flagged
        lambda: client.training(base_model="org/tiny", rnk=8),  # flagged
        lambda: client.sampling(basemodel="org/tiny"),  # flagged
        lambda: training.forward(input_idz=[1, 2]),  # flagged
        lambda: training.forward_backward(input_ids=[1, 2], input={"weights": [1.0, 1.0]}),  # flagged
        lambda: training.train_step(texts=["a"], los="dpo"),  # flagged
        lambda: training.optim_step(optimiser=AdamWConfig()),  # flagged
        lambda: training.optim_step(optimizer=AdamWConfig(learning_rte=0.1)),  # flagged
        lambda: client.training(base_model="org/tiny", schedule=LrSchedule(warmup=1)),  # flagged
        lambda: training.save_weights(name="a", ttl=7200),  # flagged
        lambda: sampler.sample(text="a", max_token=8),  # flagged
        lambda: sampler.stream(text="a", temprature=0.0),  # flagged
    ]


def main() -> None:
    server = NativeServer()
    with Client(URL, transport=server.transport) as client:
        training, sampler = client.training(base_model="org/tiny"), client.sampling(base_model="org/tiny")
        num_before = len(server.calls)
        for mistake in mistakes(client, training, sampler):
            try:
                mistake()
            except (TypeError, ValueError) as error:
                print(f"{type(error).__name__}: {str(error).splitlines()[0]}")
        print(f"requests after the set-up: {len(server.calls) - num_before}")


if __name__ == "__main__":
    main()
