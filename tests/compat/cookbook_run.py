"""Trains through tinker-cookbook's own train functions, each for a few steps on data made here. `python -m tests.compat.cookbook` runs this
in an environment that holds tinker-cookbook; nothing of this project is imported.

    python cookbook_run.py --base-url URL --model NAME --logs DIRECTORY [RUN ...]

Writes a JSON line a run to the standard output: its name, the figure that it follows, whether that is to rise, and the figure step by step.
"""

import argparse
import asyncio
import json
import sys
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

import chz
import datasets
from tinker_cookbook import renderers
from tinker_cookbook.preference import train_dpo
from tinker_cookbook.preference.dpo_datasets import DPODatasetBuilderFromComparisons
from tinker_cookbook.preference.preference_datasets import ComparisonDatasetBuilder
from tinker_cookbook.preference.types import Comparison, LabeledComparison
from tinker_cookbook.rl import train as rl
from tinker_cookbook.rl.problem_env import ProblemEnv, ProblemGroupBuilder
from tinker_cookbook.rl.types import EnvGroupBuilder, RLDataset, RLDatasetBuilder
from tinker_cookbook.supervised import train as supervised
from tinker_cookbook.supervised.data import FromConversationFileBuilder
from tinker_cookbook.supervised.types import ChatDatasetBuilderCommonConfig
from tinker_cookbook.tokenizer_utils import get_tokenizer

RENDERER = "qwen3_instruct"  # ChatML, as SmolLM2 knows it; the package knows no renderer for that model
RANK = 8
MAX_LENGTH = 128
GROUP = 8
MAX_TOKENS = 8

ANSWERS = [  # question, the answer that is taught and preferred, the one that is not
    ("What do bees make?", "Honey.", "Well, that is an interesting question."),
    ("How many legs does a spider have?", "Eight.", "Spiders are fascinating animals."),
    ("What colour is the sky?", "Blue.", "It depends on many things."),
    ("What is 2 + 3?", "Five.", "Let me think about numbers first."),
]
SUMS = [(2, 3), (4, 4)]


def message(role: str, content: str) -> renderers.Message:
    return {"role": role, "content": content}


@chz.chz
class Preferences(ComparisonDatasetBuilder):
    """The first answer to each question is the better one."""

    def get_train_and_test_datasets(self) -> tuple[datasets.Dataset, None]:
        return datasets.Dataset.from_list([dict(zip(("question", "good", "bad"), row, strict=True)) for row in ANSWERS]), None

    def example_to_labeled_comparison(self, example: dict) -> LabeledComparison:
        good, bad = ([message("assistant", example[which])] for which in ("good", "bad"))
        return LabeledComparison(Comparison([message("user", example["question"])], good, bad), "A")


class Sum(ProblemEnv):
    """The answer earns the share of it that is the right number."""

    def __init__(self, renderer: renderers.Renderer, terms: tuple[int, int]) -> None:
        super().__init__(renderer, [message("user", "What is 4 + 5?"), message("assistant", "9")], format_coef=0.0)
        self.terms = terms

    def get_question(self) -> str:
        return f"What is {self.terms[0]} + {self.terms[1]}?"

    def check_answer(self, sample_str: str) -> float:  # the trainer takes what lies between wrong and right too
        right, said = self.get_reference_answer(), sample_str.strip()
        return len(right) / len(said) if right in said else 0.0

    def check_format(self, sample_str: str) -> bool:
        return True

    def get_reference_answer(self) -> str:
        return str(sum(self.terms))


class Sums(RLDataset):
    """The same problems in every batch, so that rewards can be compared."""

    def __init__(self, renderer: renderers.Renderer, num_batches: int) -> None:
        self.renderer = renderer
        self.num_batches = num_batches

    def get_batch(self, index: int) -> Sequence[EnvGroupBuilder]:
        return [ProblemGroupBuilder(partial(Sum, self.renderer, terms), GROUP) for terms in SUMS]

    def __len__(self) -> int:
        return self.num_batches


@chz.chz
class SumsBuilder(RLDatasetBuilder):
    model: str
    num_batches: int

    async def __call__(self) -> tuple[RLDataset, None]:
        return Sums(renderers.get_renderer(RENDERER, get_tokenizer(self.model)), self.num_batches), None


def run_supervised(url: str, model: str, logs: Path) -> None:
    rows = [{"messages": [message("user", question), message("assistant", answer)]} for question, answer, _ in ANSWERS]
    path = logs.with_suffix(".jsonl")
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    config = supervised.Config(
        log_path=str(logs),
        model_name=model,
        recipe_name="compat",
        renderer_name=RENDERER,
        dataset_builder=FromConversationFileBuilder(file_path=str(path), common_config=rendered(model)),
        learning_rate=1e-3,
        lr_schedule="constant",
        num_epochs=6,
        lora_rank=RANK,
        base_url=url,
        save_every=3,
        eval_every=0,
    )
    asyncio.run(supervised.main(config))


def run_rl(loss: str, url: str, model: str, logs: Path) -> None:
    config = rl.Config(
        learning_rate=6e-4,
        dataset_builder=SumsBuilder(model=model, num_batches=6),
        model_name=model,
        recipe_name="compat",
        renderer_name=RENDERER,
        max_tokens=MAX_TOKENS,
        log_path=str(logs),
        loss_fn=loss,
        num_substeps=2 if loss == "ppo" else 1,
        lora_rank=RANK,
        base_url=url,
        eval_every=0,
        save_every=3,
    )
    asyncio.run(rl.main(config))


def run_dpo(url: str, model: str, logs: Path) -> None:
    config = train_dpo.Config(
        log_path=str(logs),
        model_name=model,
        recipe_name="compat",
        dataset_builder=DPODatasetBuilderFromComparisons(comparison_builder=Preferences(), common_config=rendered(model)),
        renderer_name=RENDERER,
        learning_rate=3e-4,
        lr_schedule="constant",
        num_epochs=5,
        lora_rank=RANK,
        base_url=url,
        save_every=0,
        eval_every=0,
    )
    train_dpo.main(config)


def rendered(model: str) -> ChatDatasetBuilderCommonConfig:
    return ChatDatasetBuilderCommonConfig(
        model_name_for_tokenizer=model, renderer_name=RENDERER, max_length=MAX_LENGTH, batch_size=len(ANSWERS)
    )


RUNS: dict[str, tuple[Callable[[str, str, Path], None], str, bool]] = {  # the call, the figure that it logs, whether it is to rise
    "supervised": (run_supervised, "train_mean_nll", False),
    "rl importance_sampling": (partial(run_rl, "importance_sampling"), "env/all/reward/total", True),
    "rl ppo": (partial(run_rl, "ppo"), "env/all/reward/total", True),
    "dpo": (run_dpo, "dpo_loss", False),
}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--base-url", required=True)
    parser.add_argument("--model", required=True)
    parser.add_argument("--logs", type=Path, required=True, help="a new directory: an old one is taken up where it ended")
    parser.add_argument("runs", nargs="*", choices=[*RUNS, []], default=[])
    args = parser.parse_args()
    args.logs.mkdir(parents=True)
    for name in args.runs or RUNS:
        train, figure, rises = RUNS[name]
        logs = args.logs / name.replace(" ", "-")
        train(args.base_url, args.model, logs)
        logged = [json.loads(line) for line in (logs / "metrics.jsonl").read_text().splitlines()]
        values = [step[figure] for step in logged if figure in step]
        print(json.dumps({"run": name, "figure": figure, "rises": rises, "values": values}), file=sys.__stdout__, flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
