"""Lesson 202: learn from preferences (DPO) with the typed client.

A pair is two conversations that differ in the answer: the chosen one, then the rejected one. The loss compares how much more likely the
adapter makes each answer than the base model does, so the reference is the base model with the adapter off and costs no second copy.

Run a server first (`tinsmith serve configs/cpu.yaml`), then: python cookbook/202_native_dpo.py
"""

import argparse
import math
from collections.abc import Callable

from tinsmith.client import AdamWConfig, Client, HttpError, TrainingClient

QUESTIONS = ["What do bees make?", "How many legs does a spider have?", "What colour is the sky?", "What is 2 + 3?"]
CHOSEN = ["Honey.", "Eight.", "Blue.", "Five."]  # short is what we like
REJECTED = [
    "Well, that is an interesting question about bees.",
    "Spiders are fascinating animals, as you may know.",
    "It depends on many things, such as the weather.",
    "Let me think about numbers for a while first.",
]
BETA = 0.1


def main() -> None:
    args = parse_arguments()
    pairs = [chat(question, answer) for question, *both in zip(QUESTIONS, CHOSEN, REJECTED, strict=True) for answer in both]

    with Client(args.url) as client:
        print("1. Pairs are neighbours in one command: chosen, rejected, chosen, rejected ...")
        training = client.training(
            base_model=args.model, rank=8, seed=1, optimizer=AdamWConfig(learning_rate=args.learning_rate, max_grad_norm=10.0)
        )
        assert len(pairs) == 2 * len(QUESTIONS)

        print("2. An adapter that has learned nothing prefers neither: each pair's loss is log 2.")
        start = measure(training, pairs)
        assert math.isclose(start["loss:sum"], len(QUESTIONS) * math.log(2), rel_tol=1e-5), start
        assert start["dpo/margin:mean"] == 0
        print(f"   loss {start['loss:sum']:.4f} over {len(QUESTIONS)} pairs")

        print("3. Half a pair is refused before anything is queued, and its place in the order goes to the next call.")
        refusal = refused(lambda: training.forward_backward(conversations=pairs[:3], loss="dpo"))
        assert refusal.status == 422
        print(f"   {refusal}")

        print("4. Train: one command a step.")
        futures = [training.train_step(conversations=pairs, loss="dpo", loss_config={"beta": BETA}) for _ in range(args.steps)]
        losses = [future.result().metrics["loss:sum"] for future in futures]
        print(f"   loss {losses[0]:.4f} -> {losses[-1]:.4f}")

        print("5. Now the chosen answer of every pair wins.")
        end = measure(training, pairs)
        print(f"   accuracy {end['dpo/accuracy:mean']:.0%}, mean margin {end['dpo/margin:mean']:.3f}")
        assert end["dpo/accuracy:mean"] == 1.0
        assert end["loss:sum"] < start["loss:sum"]

        print("6. The log-probs say the same: chosen answers gained more than rejected ones.")
        fresh = client.training(base_model=args.model, rank=8, seed=1)
        gains = [new - old for new, old in zip(answer_logprobs(training, pairs), answer_logprobs(fresh, pairs), strict=True)]
        assert all(chosen > rejected for chosen, rejected in zip(gains[::2], gains[1::2], strict=True)), gains


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--url", default="http://127.0.0.1:8700")
    parser.add_argument("--model", default="HuggingFaceTB/SmolLM2-135M-Instruct")
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--learning-rate", type=float, default=5e-4)
    return parser.parse_args()


def chat(question: str, answer: str) -> list[dict[str, str]]:
    return [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]


def refused(call: Callable[[], object]) -> HttpError:
    try:
        call()
    except HttpError as error:
        return error
    raise AssertionError("the request was taken")


def measure(training: TrainingClient, pairs: list[list[dict[str, str]]]) -> dict[str, float]:
    """Loss, accuracy and margin, without a gradient."""
    return training.evaluate(conversations=pairs, loss="dpo", loss_config={"beta": BETA}).result().metrics


def answer_logprobs(training: TrainingClient, chats: list[list[dict[str, str]]]) -> list[float]:
    """Of each answer as a whole. One chat a command: the loss is then minus the log-prob of its answer's tokens."""
    futures = [training.evaluate(conversations=[one]) for one in chats]
    return [-future.result().metrics["loss:sum"] for future in futures]


if __name__ == "__main__":
    main()
