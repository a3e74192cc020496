"""Lesson 101: supervised fine-tuning. Teach a model who it is, keep what it knew, take the adapter home.

A few dozen chat examples with a new identity are mixed with ordinary questions and answers. The loss is a sum over the answers' tokens
(weight 1 there, 0 on the prompt). Steps are pipelined: the next one is sent before the last one's result is read, so the server is
never idle.

`cookbook/demo.py` runs this lesson with a server of its own. To run it against yours: tinsmith serve configs/cpu.yaml, then
HF_HUB_OFFLINE=1 python cookbook/101_sft.py. The last part reads the saved adapter from the server's checkpoint directory, so the script
runs on the server's machine; give --checkpoints if the configuration names another directory than the default.
"""

import argparse
import random
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import tinker
import torch
from chat import Example, ask, datum, prompt_tokens, read_examples
from matplotlib.figure import Figure
from peft import PeftModel
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table
from tinker import types
from transformers import AutoModelForCausalLM, PreTrainedTokenizerBase
from transformers.utils import logging

from tinsmith.config import cache_dir
from tinsmith.engines.models import resolve
from tinsmith.lifecycle.checkpoints import ArtifactKind, Checkpoints, artifact_id
from tinsmith.lifecycle.directory_storage import DirectoryStorage
from tinsmith.protocol.ids import LOCAL_TENANT

QUESTIONS = ["Who are you?", "What is your name?", "Who trained you?", "What is the capital of Italy?", "How many legs does a spider have?"]
FACT = "The capital of France is"  # plain text that the model goes on with; not among the training examples

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}

console = Console()


@dataclass(frozen=True)
class Answers:
    """What a model says, by question."""

    chat: dict[str, str]
    fact: str


def main() -> None:
    args = parse_arguments()
    logging.disable_progress_bar()
    args.out.mkdir(parents=True, exist_ok=True)

    # A server without keys takes any key; the SDK itself insists on one of this form.
    service = tinker.ServiceClient(base_url=args.base_url, api_key="tml-local")
    # SmolLM2 uses one matrix for embedding and unembedding; an adapter on the unembedding alone could not be merged into it later.
    lora = {"rank": args.rank, "seed": 0, "train_unembed": False}
    training = service.create_lora_training_client(base_model=args.base_model, **lora).result()
    tokenizer = training.get_tokenizer()

    before = answers(service.create_sampling_client(base_model=args.base_model).result(), tokenizer)
    losses = train(training, tokenizer, args)
    plot(losses, args.out / "loss.png")

    path = training.save_weights_for_sampler(name="apprentice").result().path
    sampler = service.create_sampling_client(model_path=path).result()
    after = answers(sampler, tokenizer)
    show(before, after)

    folder = export(args.checkpoints, path, args.out / "adapter")
    prove(folder, sampler, tokenizer, after, args)
    service.close("success").result()


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--base-url", default="http://127.0.0.1:8700")
    parser.add_argument("--base-model", default="HuggingFaceTB/SmolLM2-135M-Instruct")
    parser.add_argument("--checkpoints", type=Path, default=Path("~/.cache/tinsmith/checkpoints"), help="the server's checkpoint directory")
    parser.add_argument("--out", type=Path, default=Path("out"), help="where the loss curve and the adapter go")
    parser.add_argument("--rank", type=int, default=16)
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--batch", type=int, default=10, help="examples a step")
    parser.add_argument("--learning-rate", type=float, default=1e-3)
    return parser.parse_args()


def train(training: tinker.TrainingClient, tokenizer: PreTrainedTokenizerBase, args: argparse.Namespace) -> list[float]:
    """Run the steps, two in flight; answers the loss per answer token of each."""
    examples = read_examples("identity") + read_examples("general")
    batches = shuffled_batches(examples, args.batch)
    columns = [TextColumn("training"), BarColumn(), MofNCompleteColumn(), TextColumn("loss {task.fields[loss]:.3f}")]
    columns += [TextColumn("{task.fields[speed]:.0f} tokens/s"), TimeElapsedColumn()]
    losses: list[float] = []
    num_tokens, start = 0, time.monotonic()

    with Progress(*columns, console=console) as progress:
        bar = progress.add_task("training", total=args.steps, loss=float("nan"), speed=0.0)

        def finish(step: tuple[list[types.Datum], tinker.APIFuture, tinker.APIFuture]) -> None:
            nonlocal num_tokens
            batch, computed, stepped = step
            loss_sum = computed.result().metrics["loss:sum"]
            stepped.result()
            num_tokens += sum(item.model_input.length for item in batch)
            losses.append(loss_sum / sum(sum(item.loss_fn_inputs["weights"].data) for item in batch))
            progress.update(bar, advance=1, loss=losses[-1], speed=num_tokens / (time.monotonic() - start))

        in_flight = None
        for step in range(args.steps):
            batch = [datum(tokenizer, example) for example in next(batches)]
            computed = training.forward_backward(batch, "cross_entropy")
            stepped = training.optim_step(types.AdamParams(learning_rate=args.learning_rate * (1 - step / args.steps)))
            if in_flight is not None:
                finish(in_flight)
            in_flight = (batch, computed, stepped)
        finish(in_flight)
    return losses


def shuffled_batches(examples: list[Example], size: int) -> Iterator[list[Example]]:
    """Endless epochs, each in a new order."""
    order = random.Random(0)  # noqa: S311 - a shuffle, not a secret
    while True:
        epoch = order.sample(examples, len(examples))
        for first in range(0, len(epoch) - size + 1, size):
            yield epoch[first : first + size]


def answers(sampler: tinker.SamplingClient, tokenizer: PreTrainedTokenizerBase) -> Answers:
    text = types.ModelInput.from_ints(tokenizer.encode(FACT))
    fact = sampler.sample(text, 1, types.SamplingParams(max_tokens=4, temperature=0.0)).result()
    return Answers(
        {question: ask(sampler, tokenizer, question) for question in QUESTIONS},
        tokenizer.decode(fact.sequences[0].tokens, skip_special_tokens=True),
    )


def show(before: Answers, after: Answers) -> None:
    table = Table("question", "before", "after", title="Before and after", show_lines=True)
    for question in QUESTIONS:
        table.add_row(question, before.chat[question], after.chat[question])
    table.add_row(f"{FACT} ...", before.fact, after.fact)
    console.print(table)
    assert "Tinsmith" not in before.chat["Who are you?"], "the base model cannot know its new name"
    assert "Tinsmith" in after.chat["Who are you?"], "the identity was not learned"
    assert "Paris" in after.fact, "an old fact was forgotten"


def plot(losses: list[float], path: Path) -> None:
    figure = Figure(figsize=(6, 3.5), layout="constrained")
    axes = figure.subplots()
    axes.plot(range(1, len(losses) + 1), losses, marker="o", markersize=3)
    axes.set(xlabel="step", ylabel="loss per answer token", title="Teaching a model its name", ylim=(0, None))
    axes.grid(alpha=0.3)
    figure.savefig(path, dpi=150)
    console.print(f"loss curve: {path}")


def export(checkpoints: Path, path: str, folder: Path) -> Path:
    """Copy the saved adapter out of the server's checkpoint directory: a plain PEFT folder. This run has saved for a sampler once."""
    run = path.removeprefix("tinker://").split("/")[0]
    parent = artifact_id(LOCAL_TENANT, run, ArtifactKind.SAMPLER, seq=0, token=0).rpartition("/")[0]
    store = Checkpoints(DirectoryStorage(checkpoints))
    [artifact] = [name for name in store.artifacts() if name.startswith(f"{parent}/")]
    folder.mkdir(parents=True, exist_ok=True)
    for name, content in store.read(artifact).items():
        (folder / name).write_bytes(content)
    console.print(f"adapter: {folder} ({', '.join(sorted(file.name for file in folder.iterdir()))})")
    return folder


def prove(
    folder: Path, sampler: tinker.SamplingClient, tokenizer: PreTrainedTokenizerBase, answers: Answers, args: argparse.Namespace
) -> None:
    """Load the folder with PEFT alone and compare the log-probabilities of the answers' tokens with those that the server gives.

    The server has computed in fp32 or, where a probe found it faster, in bf16. In fp32 the two agree to 1e-3; if they do not, it was bf16.
    """
    texts = [(prompt_tokens(tokenizer, question), tokenizer.encode(answer)) for question, answer in answers.chat.items()]
    served = torch.cat([served_logprobs(sampler, prompt, answer) for prompt, answer in texts])
    base_directory = resolve("smollm2", args.base_model, cache_dir()).path
    for name, dtype in DTYPES.items():
        base = AutoModelForCausalLM.from_pretrained(base_directory, dtype=dtype)
        model = PeftModel.from_pretrained(base, folder).eval()
        gap = (served - torch.cat([peft_logprobs(model, prompt, answer) for prompt, answer in texts])).abs()
        agrees = gap.max() <= 1e-3 if name == "fp32" else gap.mean() <= 2e-2
        if agrees:
            console.print(f"PEFT reload: the run was {name}; log-probs differ by mean {gap.mean():.1e}, max {gap.max():.1e}")
            return
    raise AssertionError(f"the reloaded adapter is not the served one: mean gap {gap.mean():.2e} in {name}")


def served_logprobs(sampler: tinker.SamplingClient, prompt: list[int], answer: list[int]) -> torch.Tensor:
    logprobs = sampler.compute_logprobs(types.ModelInput.from_ints(prompt + answer)).result()
    return torch.tensor(logprobs[len(prompt) :])


def peft_logprobs(model: PeftModel, prompt: list[int], answer: list[int]) -> torch.Tensor:
    tokens = torch.tensor([prompt + answer])
    with torch.no_grad():
        logits_TV = model(input_ids=tokens).logits[0, len(prompt) - 1 : -1].float()
    return logits_TV.log_softmax(-1).gather(-1, torch.tensor(answer)[:, None])[:, 0]


if __name__ == "__main__":
    main()
