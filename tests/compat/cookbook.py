"""Runs tinker-cookbook's own train functions against this server with SmolLM2, and prints a table: losses fall, rewards rise.

    python -m tests.compat.cookbook [--base-url URL] [RUN ...]

A run is one of: supervised, "rl importance_sampling", "rl ppo", dpo; all of them unless named. The package lives in an environment of its
own, out/cookbook, for it pins what the project does not. Without a URL a server is started.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from tests.model_cache import SMOLLM2_NAME, smollm2
from tests.server_process import ServerProcess
from tinsmith.tables import table

ROOT = Path(__file__).resolve().parents[2]
ENVIRONMENT = ROOT / "out" / "cookbook"
PYTHON = ENVIRONMENT / "bin" / "python"
SCRIPT = Path(__file__).with_name("cookbook_run.py")
COOKBOOK = "tinker-cookbook==0.6.1"
# What it asks for, but for tml-renderers, whose release 0.4.1 or later it names: 0.2.1 serves, as long as no model of that family is used.
DEPENDENCIES = [
    "aiohttp",
    "anyio",
    "blobfile",
    "chz",
    "cloudpickle",
    "datasets",
    "huggingface-hub",
    "numpy",
    "pillow",
    "pydantic",
    "pyrage",
    "rich",
    "safetensors",
    "termcolor",
    "tiktoken",
    "tinker==0.38.0",
    "tml-renderers==0.2.1",
    "torch",
    "tqdm",
    "transformers",
]
RUN_S = 3600.0


@dataclass(frozen=True, slots=True)
class Series:
    """A figure, step by step. It learned if the mean of the second half is better than that of the first."""

    run: str
    figure: str
    rises: bool
    values: list[float]

    @property
    def learned(self) -> bool:
        half = len(self.values) // 2
        if half == 0:
            return False
        first, second = sum(self.values[:half]) / half, sum(self.values[-half:]) / half
        return second > first if self.rises else second < first

    def row(self) -> list[str]:
        way = "rises" if self.rises else "falls"
        return [self.run, self.figure, " ".join(f"{value:.3f}" for value in self.values), f"{way}: {'yes' if self.learned else 'NO'}"]


def install() -> None:
    """Make the environment unless it is there, with the releases that the project is tested with."""
    stamp = ENVIRONMENT / ".installed"
    if stamp.exists():
        return
    subprocess.run([sys.executable, "-m", "venv", ENVIRONMENT], check=True)
    pip = [PYTHON, "-m", "pip", "install", "--quiet"]
    subprocess.run([*pip, "--no-deps", COOKBOOK], check=True)
    subprocess.run([*pip, "-c", ROOT / "constraints.txt", *DEPENDENCIES], check=True)
    stamp.touch()


@contextmanager
def served(url: str | None) -> Iterator[str]:
    """The server at that address, or one of its own."""
    smollm2()  # fills the hub's cache, from which the package takes the tokenizer
    if url is not None:
        yield url
        return
    with tempfile.TemporaryDirectory() as checkpoints:
        model = {"name": SMOLLM2_NAME, "source": "smollm2", "dtype": "auto"}
        with ServerProcess.start({"models": [model], "checkpoints": {"dir": checkpoints}}) as server:
            yield server.url


def run(url: str, names: list[str]) -> Iterator[Series]:
    """Raises SystemExit with the end of the log if a run fails."""
    env = os.environ | {"HF_HUB_OFFLINE": "1", "TINKER_API_KEY": "tml-local", "TINKER_TELEMETRY": "0", "OMP_NUM_THREADS": "1"}
    with tempfile.TemporaryDirectory() as logs:
        command = [PYTHON, SCRIPT, "--base-url", url, "--model", SMOLLM2_NAME, "--logs", f"{logs}/runs", *names]
        done = subprocess.run(command, env=env, capture_output=True, text=True, check=False, timeout=RUN_S)
    for line in done.stdout.splitlines():
        if line.startswith('{"run"'):
            yield Series(**json.loads(line))
    if done.returncode:
        raise SystemExit(f"exit {done.returncode}\n{done.stderr[-5000:]}")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--base-url", help="of a server with SmolLM2; one is started unless given")
    parser.add_argument("runs", nargs="*")
    args = parser.parse_args()
    install()
    series: list[Series] = []
    with served(args.base_url) as url:
        for one in run(url, args.runs):
            series.append(one)
            print("  ".join(one.row()), flush=True)
    print(table(["run", "figure", "step by step", "as it should"], [one.row() for one in series]))
    return int(not all(one.learned for one in series))


if __name__ == "__main__":
    sys.exit(main())
