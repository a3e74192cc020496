"""Load from the stock SDK: models that train and sample from threads of their own until they are told to stop, and what became of them.

Every model's course is fixed by its seed and the number of its steps, so it can be run again undisturbed and compared.
"""

import threading
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Self

import tinker
from tinker import types

from tinsmith.lifecycle.checkpoints import ArtifactKind, Checkpoints
from tinsmith.lifecycle.directory_storage import DirectoryStorage
from tinsmith.state.catalog import split_path

MODEL = "HuggingFaceTB/SmolLM2-135M-Instruct"
SAMPLE_EVERY = 4  # steps
THINK_S = 0.1  # of a caller between two steps under load: a long restart is not to make a long repeat
RESULT_S = 120.0


def datum(*tokens: int, target: int = 4) -> types.Datum:
    targets = [*tokens[1:], target]
    return types.Datum(
        model_input=types.ModelInput.from_ints(list(tokens)),
        loss_fn_inputs={"target_tokens": targets, "weights": [1.0] * len(targets)},  # type: ignore[dict-item]
    )


def step(model: tinker.TrainingClient, number: int) -> float:
    """One training step; answers its loss."""
    backward = model.forward_backward([datum(1, 2, 3 + number % 5), datum(4, 5, 6)], "cross_entropy")
    optim = model.optim_step(types.AdamParams(learning_rate=0.1 / (1 + number)))
    loss = backward.result(RESULT_S).metrics["loss:sum"]
    optim.result(RESULT_S)
    return loss


def created(service: tinker.ServiceClient, seed: int) -> tinker.TrainingClient:
    return service.create_lora_training_client(MODEL, rank=4, seed=seed).result(RESULT_S)


@dataclass
class Course:
    """One model's run: its losses, the tokens that it drew, and the path of the checkpoint at its end."""

    seed: int
    losses: list[float] = field(default_factory=list)
    tokens: list[list[int]] = field(default_factory=list)
    saved: str = ""

    def run(self, service: tinker.ServiceClient, is_over: threading.Event, num_steps: int | None = None) -> None:
        """Until it is over, or for a number of steps."""
        model = created(service, self.seed)
        while len(self.losses) != num_steps and not (num_steps is None and is_over.is_set()):
            self.losses.append(step(model, len(self.losses)))
            if len(self.losses) % SAMPLE_EVERY == 0:
                self._sample(model)
            if num_steps is None:
                is_over.wait(THINK_S)
        self.saved = model.save_state("final").result(RESULT_S).path

    def _sample(self, model: tinker.TrainingClient) -> None:
        sampler = model.save_weights_and_get_sampling_client().result(RESULT_S)
        params = types.SamplingParams(max_tokens=5, seed=len(self.losses), temperature=1.0)
        answer = sampler.sample(types.ModelInput.from_ints([1, 2, 3]), num_samples=2, sampling_params=params).result(RESULT_S)
        self.tokens += [list(sequence.tokens) for sequence in answer.sequences]


class Load:
    """`num_models` courses, each in a thread with a client of its own, while the block runs; its end is `finish`."""

    def __init__(self, url: str, num_models: int) -> None:
        self._url = url
        self.courses = [Course(seed) for seed in range(num_models)]
        self.failures: list[Exception] = []
        self._is_over = threading.Event()
        self._threads = [threading.Thread(target=self._run, args=(course,), daemon=True) for course in self.courses]

    @property
    def num_steps(self) -> int:
        return sum(len(course.losses) for course in self.courses)

    def wait_for(self, num_steps: int, timeout_s: float = 60.0) -> None:
        """Return when every model has made that many more steps."""
        wanted = [len(course.losses) + num_steps for course in self.courses]
        deadline = time.monotonic() + timeout_s
        while any(len(course.losses) < count for course, count in zip(self.courses, wanted, strict=True)):
            assert not self.failures, self.failures
            assert time.monotonic() < deadline, f"{[len(course.losses) for course in self.courses]} of {wanted} steps"
            time.sleep(0.05)

    def __enter__(self) -> Self:
        for thread in self._threads:
            thread.start()
        return self

    def finish(self) -> None:
        """Let every course end with a checkpoint. Raises what failed."""
        self._is_over.set()
        for thread in self._threads:
            thread.join(2 * RESULT_S)
        assert not any(thread.is_alive() for thread in self._threads)
        assert self.failures == []

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._is_over.set()
        if error is None:
            self.finish()

    def _run(self, course: Course) -> None:
        service = tinker.ServiceClient(base_url=self._url, api_key="tml-local")
        try:
            course.run(service, self._is_over)
        except Exception as failure:  # noqa: BLE001 - whatever a call raises is what these tests count
            self.failures.append(failure)
        finally:
            service.close("success").result()


def files_of(checkpoints: Path, path: str) -> dict[str, bytes]:
    """What lies under a checkpoint's path: the newest save of that run and kind."""
    run_id, kind, _ = split_path(path)
    store = Checkpoints(DirectoryStorage(checkpoints))
    prefix = f"local/{run_id.replace(':', '=3A')}/{ArtifactKind(kind)}/"
    artifacts = [artifact for artifact in store.artifacts() if artifact.startswith(prefix)]
    return store.read(max(artifacts, key=lambda artifact: int(artifact.rsplit("/", 1)[1].split("-")[0])))


def undisturbed(url: str, course: Course) -> Course:
    """The same course again, when nothing is replaced."""
    service = tinker.ServiceClient(base_url=url, api_key="tml-local")
    again = Course(course.seed)
    again.run(service, threading.Event(), len(course.losses))
    service.close("success").result()
    return again


def assert_undisturbed(courses: Sequence[Course], url: str, checkpoints: Path) -> None:
    """Each course has the losses, tokens and, bit for bit, the checkpoint that it has when nothing is replaced."""
    with ThreadPoolExecutor(len(courses)) as threads:
        repeats = list(threads.map(lambda course: undisturbed(url, course), courses))
    for course, again in zip(courses, repeats, strict=True):
        assert course.losses == again.losses
        assert course.tokens == again.tokens
        assert files_of(checkpoints, course.saved) == files_of(checkpoints, again.saved)
