"""What the end-to-end tests train on, and the same loop run in process on the engine: the reference that the server must equal."""

from array import array
from collections.abc import Sequence

import tinker
from tinker import types

from tinsmith.engines.base import Job
from tinsmith.engines.peft_engine import PeftEngine
from tinsmith.protocol.inputs import Datum, ModelInput, TextChunk
from tinsmith.protocol.tensors import DType, Tensor
from tinsmith.protocol.training import AdamParams, Compute, ComputeOutput, LoraConfig, OptimOutput, OptimStep

SMOLLM2 = "HuggingFaceTB/SmolLM2-135M-Instruct"
RANK = 8
SEED = 7
LEARNING_RATE = 1e-3


def tokens_of(lesson: int, length: int = 12) -> list[int]:
    """A fixed pseudo-random token sequence per lesson, well inside SmolLM2's vocabulary."""
    state = 12345 + 7919 * lesson
    tokens = []
    for _ in range(length + 1):
        state = (1103515245 * state + 12345) % 2**31
        tokens.append(100 + state % 40_000)
    return tokens


def sdk_datum(lesson: int, length: int = 12) -> types.Datum:
    tokens = tokens_of(lesson, length)
    return types.Datum(
        model_input=types.ModelInput.from_ints(tokens[:-1]),
        loss_fn_inputs={"target_tokens": tokens[1:], "weights": [1.0] * length},  # type: ignore[dict-item]
    )


def engine_datum(lesson: int, length: int = 12) -> Datum:
    tokens = tokens_of(lesson, length)
    return Datum(
        ModelInput((TextChunk(array("i", tokens[:-1]).tobytes()),)),
        {
            "target_tokens": Tensor(DType.INT64, (length,), array("q", tokens[1:]).tobytes()),
            "weights": Tensor(DType.FLOAT32, (length,), array("f", [1.0] * length).tobytes()),
        },
    )


def logprobs_of(output: types.ForwardBackwardOutput) -> list[list[float]]:
    return [[float(x) for x in record["logprobs"].data] for record in output.loss_fn_outputs]


class Loop:
    """The training loop that the server is compared with: the same engine, called directly."""

    def __init__(self, engine: PeftEngine, model_id: str, *, rank: int = RANK, seed: int = SEED) -> None:
        self.engine = engine
        self.model_id = model_id
        self.seq = 0
        engine.create_adapter(model_id, LoraConfig(rank=rank, seed=seed))

    def forward_backward(self, lessons: Sequence[int]) -> ComputeOutput:
        data = tuple(engine_datum(lesson) for lesson in lessons)
        answer = self._run(Compute(data=data, loss_fn="cross_entropy", loss_fn_config={}, backward=True))
        assert isinstance(answer, ComputeOutput), answer
        return answer

    def optim_step(self, **params: float) -> OptimOutput:
        answer = self._run(OptimStep(optimizer=AdamParams(**({"learning_rate": LEARNING_RATE} | params))))
        assert isinstance(answer, OptimOutput), answer
        return answer

    def losses(self, steps: int, *, first: int = 0) -> list[float]:
        losses = []
        for step in range(first, first + steps):
            losses.append(self.forward_backward([step, step + 1]).metrics["loss:sum"])
            self.optim_step()
        return losses

    def close(self) -> None:
        self.engine.drop_adapter(self.model_id)

    def _run(self, command: Compute | OptimStep) -> object:
        self.seq += 1
        return self.engine.run([Job(self.model_id, self.seq, command)])[0]


def create(service: tinker.ServiceClient, *, rank: int = RANK, seed: int = SEED) -> tinker.TrainingClient:
    return service.create_lora_training_client(base_model=SMOLLM2, rank=rank, seed=seed).result()


def pipelined_losses(client: tinker.TrainingClient, steps: int, *, first: int = 0) -> list[float]:
    """Submit every pair without waiting for any result, then collect."""
    futures = []
    for step in range(first, first + steps):
        futures.append(client.forward_backward([sdk_datum(step), sdk_datum(step + 1)], "cross_entropy"))
        client.optim_step(types.AdamParams(learning_rate=LEARNING_RATE))
    return [future.result().metrics["loss:sum"] for future in futures]
