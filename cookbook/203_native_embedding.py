"""Lesson 203: train an embedding model (InfoNCE) with the typed client.

The embedding of a text is the model's last hidden state at its last token, with length 1. A pair is a query and the text that it should
find; the other texts of the same command are what it should not find. Small batches are enough here; with more pairs in a command the task
is harder and the embeddings get better.

Run a server first (`tinsmith serve configs/cpu.yaml`), then: python cookbook/203_native_embedding.py
"""

import argparse
import math

from tinsmith.client import AdamWConfig, Client, LrSchedule, TrainingClient

CAPITALS = {
    "The capital of Italy": "Rome",
    "The capital of Japan": "Tokyo",
    "The capital of Egypt": "Cairo",
    "The capital of Peru": "Lima",
    "The capital of Kenya": "Nairobi",
    "The capital of Norway": "Oslo",
    "The capital of Chile": "Santiago",
    "The capital of Cuba": "Havana",
}
TEMPERATURE = {"temperature": 0.05}
Vector = list[float]


def main() -> None:
    args = parse_arguments()
    pairs = [text for pair in CAPITALS.items() for text in pair]  # query, its text, query, its text ...

    with Client(args.url) as client:
        print("1. Embed: plain texts in, one vector a text out.")
        training = client.training(
            base_model=args.model,
            rank=8,
            seed=1,
            optimizer=AdamWConfig(learning_rate=args.learning_rate, max_grad_norm=1.0),
            schedule=LrSchedule(kind="cosine", warmup_steps=2, total_steps=args.steps),
        )
        vectors = embed(training, pairs)
        assert len(vectors) == len(pairs)
        assert all(math.isclose(dot(vector, vector), 1.0, rel_tol=1e-4) for vector in vectors), "vectors have length 1"
        print(f"   {len(vectors)} vectors of {len(vectors[0])} numbers")

        print("2. How often is the right text the nearest, before training?")
        before = training.evaluate(texts=pairs, loss="infonce", loss_config=TEMPERATURE).result().metrics
        print(f"   {before['infonce/accuracy:mean']:.0%}, loss {before['loss:sum']:.3f}")

        print("3. Train.")
        futures = [training.train_step(texts=pairs, loss="infonce", loss_config=TEMPERATURE) for _ in range(args.steps)]
        losses = [future.result().metrics["loss:sum"] for future in futures]
        print(f"   loss {losses[0]:.3f} -> {losses[-1]:.3f}")

        print("4. And after: every query finds its text. The metric and our own count agree.")
        after = training.evaluate(texts=pairs, loss="infonce", loss_config=TEMPERATURE).result().metrics
        vectors = embed(training, pairs)
        queries, texts = vectors[::2], vectors[1::2]
        nearest = [max(range(len(texts)), key=lambda place: dot(query, texts[place])) for query in queries]
        assert after["infonce/accuracy:mean"] == 1.0, after
        assert nearest == list(range(len(texts)))
        assert after["loss:sum"] < before["loss:sum"]

        print("5. The adapter is a checkpoint as any other.")
        saved = training.save_weights(name="lesson-203").result()
        again = client.training(checkpoint=saved.checkpoint)
        assert embed(again, pairs) == vectors
        print(f"   {saved.checkpoint}")


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--url", default="http://127.0.0.1:8700")
    parser.add_argument("--model", default="HuggingFaceTB/SmolLM2-135M-Instruct")
    parser.add_argument("--steps", type=int, default=24)
    parser.add_argument("--learning-rate", type=float, default=1e-3)
    return parser.parse_args()


def embed(training: TrainingClient, texts: list[str]) -> list[Vector]:
    """A forward pass with the embedding loss; results have `.numpy()` too."""
    return [array.tolist() for array in training.forward(texts=texts, loss="infonce").result().embeddings]


def dot(one: Vector, other: Vector) -> float:
    return sum(a * b for a, b in zip(one, other, strict=True))


if __name__ == "__main__":
    main()
