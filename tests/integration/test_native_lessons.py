"""The lessons of the typed client, run as their readers run them: a script against a server that `tinsmith serve` started, here with a
tiny random model. Each lesson asserts what it teaches."""

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.model_cache import TINY_NAME, tiny_model
from tests.server_process import ServerProcess

COOKBOOK = Path(__file__).resolve().parents[2] / "cookbook"
LESSON_S = 120.0


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    config = {
        "models": [{"name": TINY_NAME, "source": tiny_model().path, "dtype": "fp32"}],
        "gateway": {"replicas": 1},
        "checkpoints": {"dir": str(tmp_path_factory.mktemp("checkpoints"))},
    }
    with ServerProcess.start(config) as server:
        yield server


@pytest.mark.parametrize(
    ("lesson", "options", "num_steps"),
    [  # a random model of two layers learns a few texts at such rates
        ("201_native_sft", ["--learning-rate", "1e-2"], 7),
        ("202_native_dpo", ["--learning-rate", "1e-2"], 6),
        ("203_native_embedding", ["--learning-rate", "5e-3", "--steps", "60"], 5),
        ("204_cancel_and_errors", [], 5),
    ],
)
def test_a_lesson_keeps_what_it_says(server: ServerProcess, lesson: str, options: list[str], num_steps: int) -> None:
    command = [sys.executable, str(COOKBOOK / f"{lesson}.py"), "--url", server.url, "--model", TINY_NAME, *options]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=LESSON_S, check=False)
    assert ended.returncode == 0, ended.stdout[-2000:] + ended.stderr[-4000:]
    numbered = [line.split(".")[0] for line in ended.stdout.splitlines() if line[:1].isdigit()]
    assert numbered == [str(number) for number in range(1, num_steps + 1)]


def test_the_lessons_of_the_typed_client_import_nothing_but_it() -> None:
    for path in sorted(COOKBOOK.glob("2*.py")):
        lines = [line for line in path.read_text().splitlines() if line.startswith(("import ", "from "))]
        modules = {line.split()[1].split(".")[0] for line in lines}
        assert modules - set(sys.stdlib_module_names) == {"tinsmith"}, path.name
        assert not any("tinsmith." in line and "tinsmith.client" not in line for line in lines), path.name
