"""Lesson 201: supervised fine-tuning with the typed client.

The server renders chats with the model's own template and puts the loss on the assistant's turns alone. It keeps optimizer and learning
rate schedule with the adapter, and runs forward_backward and optim_step as one command. So a client needs no tokenizer, no torch and no
SDK: this lesson imports `tinsmith.client` and the standard library.

Run a server first (`tinsmith serve configs/cpu.yaml`), then: python cookbook/201_native_sft.py
"""

import argparse
import json
from pathlib import Path

from tinsmith.client import AdamWConfig, Client, LrSchedule, TrainingClient

DATA = Path(__file__).parent / "data" / "identity.jsonl"
Chat = list[dict[str, str]]


def main() -> None:
    args = parse_arguments()
    chats = read_chats(args.examples)

    with Client(args.url) as client:
        print("1. What can this server do for the model?")
        [base] = [model for model in client.capabilities().base_models if model.name == args.model]
        print(f"   operations: {', '.join(base.operations)}; losses: {', '.join(base.losses)}")
        assert "train_step" in base.operations
        assert base.has_chat, "the model has a chat template, so the server can render conversations"

        print("2. An adapter with its optimizer and its schedule. The steps below name neither.")
        training = client.training(
            base_model=args.model,
            rank=8,
            seed=1,
            optimizer=AdamWConfig(learning_rate=args.learning_rate, max_grad_norm=100.0),
            schedule=LrSchedule(kind="cosine", warmup_steps=2, total_steps=args.steps),
        )

        print("3. The loss before, over the answers' tokens: an evaluation leaves the model as it is.")
        before = loss_per_token(training, chats)
        assert loss_per_token(training, chats) == before
        print(f"   {before:.3f} a token")

        print("4. All steps are sent at once; the server keeps their order. Then the results.")
        futures = [training.train_step(conversations=chats) for _ in range(args.steps)]
        steps = [future.result().metrics for future in futures]
        rates = [step["learning_rate:mean"] for step in steps]
        assert rates[0] < rates[1] > rates[-1], "two steps of warm-up, then the cosine falls"
        assert all(step["unclipped_grad_l2:mean"] > 0 for step in steps)

        print("5. The loss after.")
        after = loss_per_token(training, chats)
        print(f"   {after:.3f} a token")
        assert after < 0.75 * before, f"the loss went from {before:.3f} to {after:.3f}"

        print("6. Sampler weights are frozen when they are published; the question is rendered by the server too.")
        sampler = training.publish_sampler_weights().result()
        question = chats[0][:1]
        first, again = (sampler.sample(messages=question, max_tokens=16, temperature=0).result().sequences[0] for _ in range(2))
        assert first.tokens == again.tokens, "temperature 0 is greedy"
        print(f"   {question[0]['content']} -> {first.text!r}")

        print("7. A checkpoint, and a second model that goes on from it with the optimizer's state.")
        saved = training.save_weights(name="lesson-201").result()
        resumed = client.training(checkpoint=saved.checkpoint, load_optimizer=True, optimizer=AdamWConfig(learning_rate=args.learning_rate))
        assert loss_per_token(resumed, chats) == after, "the same weights give the same loss"
        print(f"   {saved.checkpoint}")


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--url", default="http://127.0.0.1:8700")
    parser.add_argument("--model", default="HuggingFaceTB/SmolLM2-135M-Instruct")
    parser.add_argument("--examples", type=int, default=8)
    parser.add_argument("--steps", type=int, default=16)
    parser.add_argument("--learning-rate", type=float, default=1e-3)
    return parser.parse_args()


def read_chats(count: int) -> list[Chat]:
    """One turn of the user, one of the assistant."""
    examples = [json.loads(line) for line in DATA.read_text().splitlines()[:count]]
    return [[{"role": "user", "content": example["question"]}, {"role": "assistant", "content": example["answer"]}] for example in examples]


def loss_per_token(training: TrainingClient, chats: list[Chat]) -> float:
    """Losses are sums; an evaluation also tells the sum of the weights, which are 1 on the answers' tokens."""
    metrics = training.evaluate(conversations=chats).result().metrics
    return metrics["loss:sum"] / metrics["weight:sum"]


if __name__ == "__main__":
    main()
