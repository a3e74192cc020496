"""The lessons of the SDK's deeper parts, run as their readers run them: a script against a server that `tinsmith serve` started, here with
a tiny random model under the name of the one that they train, whose tokenizer it has. Each lesson asserts what it teaches."""

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.model_cache import SMOLLM2_NAME, tiny_model
from tests.server_process import ServerProcess

COOKBOOK = Path(__file__).resolve().parents[2] / "cookbook"
LESSON_S = 240.0
ENVIRONMENT = os.environ | {"HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}


def config(checkpoints: Path) -> dict[str, object]:
    model = {"name": SMOLLM2_NAME, "source": tiny_model().path, "dtype": "fp32"}
    return {"models": [model], "gateway": {"replicas": 1}, "checkpoints": {"dir": str(checkpoints)}}


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    with ServerProcess.start(config(tmp_path_factory.mktemp("checkpoints"))) as server:
        yield server


def run(lesson: str, options: list[str], env: dict[str, str]) -> str:
    command = [sys.executable, str(COOKBOOK / f"{lesson}.py"), *options]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=LESSON_S, check=False, env=ENVIRONMENT | env)
    assert ended.returncode == 0, ended.stdout[-2000:] + ended.stderr[-4000:]
    return ended.stdout


def steps_of(output: str) -> list[int]:
    return [int(line.split(".")[0]) for line in output.splitlines() if line[:1].isdigit()]


@pytest.mark.parametrize(
    ("lesson", "options", "num_steps"),
    [  # a random model of two layers learns a few texts at such rates
        ("301_dpo_custom_loss", ["--learning-rate", "1e-2"], 4),
        ("302_ppo_math", ["--problems", "2", "--warm-up", "25", "--steps", "8", "--learning-rate", "1e-3"], 3),
        ("303_distillation_topk", ["--learning-rate", "5e-3", "--steps", "20"], 3),
    ],
)
def test_a_lesson_keeps_what_it_says(server: ServerProcess, lesson: str, options: list[str], num_steps: int) -> None:
    assert steps_of(run(lesson, options, {"TINKER_BASE_URL": server.url})) == list(range(1, num_steps + 1))
