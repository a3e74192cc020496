"""Lesson 103: reinforcement learning with a reward that a program can check.

The task: answer a sum with the bare number. The reward is the share of the answer's characters that are the right number, so "7" earns 1,
"3 + 4 is 7." earns 0.09 and a wrong answer earns 0. Each step samples a group of answers a question from the present weights, gives every
token of an answer the advantage (reward - mean reward of its group), and takes one step with the importance_sampling loss.

Run a server first (`tinsmith serve configs/cpu.yaml`), then: HF_HUB_OFFLINE=1 python cookbook/103_rl.py
"""

import argparse
import re

import tinker
from chat import prompt_tokens
from rich.console import Console
from tinker import types

SUMS = [(2, 3), (4, 4), (1, 6), (3, 3)]

console = Console()


def question(a: int, b: int) -> str:
    return f"What is {a} + {b}? Answer with the number only."


def reward(answer: str, right: int) -> float:
    """Share of the answer that is the right number; 0 where another number, or none, stands in the last place."""
    numbers = re.findall(r"\d+", answer)
    if not numbers or int(numbers[-1]) != right:
        return 0.0
    return len(numbers[-1]) / len(answer.strip())


def datum(prompt: list[int], sampled: types.SampledSequence, advantage: float) -> types.Datum:
    """The prompt's rows carry advantage 0: only what the model said is reinforced."""
    num_prompt_rows = len(prompt) - 1
    tokens = prompt + list(sampled.tokens)
    return types.Datum(
        model_input=types.ModelInput.from_ints(tokens[:-1]),
        loss_fn_inputs={
            "target_tokens": tokens[1:],
            "logprobs": [0.0] * num_prompt_rows + list(sampled.logprobs),
            "advantages": [0.0] * num_prompt_rows + [advantage] * len(sampled.tokens),
        },
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--base-url", default="http://127.0.0.1:8700")
    parser.add_argument("--base-model", default="HuggingFaceTB/SmolLM2-135M-Instruct")
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--group", type=int, default=8, help="answers sampled a question")
    parser.add_argument("--learning-rate", type=float, default=4e-4)
    args = parser.parse_args()

    # A server without keys takes any key; the SDK itself insists on one of this form.
    service = tinker.ServiceClient(base_url=args.base_url, api_key="tml-local")
    training = service.create_lora_training_client(base_model=args.base_model, rank=16, seed=0).result()
    tokenizer = training.get_tokenizer()
    prompts = [prompt_tokens(tokenizer, question(a, b)) for a, b in SUMS]

    means = []
    for step in range(args.steps):
        sampler = training.save_weights_and_get_sampling_client().result()
        futures = [
            sampler.sample(types.ModelInput.from_ints(prompt), args.group, types.SamplingParams(max_tokens=16, seed=100 * step + row))
            for row, prompt in enumerate(prompts)
        ]
        batch, rewards = [], []
        for (a, b), prompt, future in zip(SUMS, prompts, futures, strict=True):
            sequences = future.result().sequences
            earned = [reward(tokenizer.decode(sequence.tokens, skip_special_tokens=True), a + b) for sequence in sequences]
            mean = sum(earned) / len(earned)
            batch += [datum(prompt, sequence, got - mean) for sequence, got in zip(sequences, earned, strict=True)]
            rewards += earned
        training.forward_backward(batch, "importance_sampling").result()
        training.optim_step(types.AdamParams(learning_rate=args.learning_rate, eps=1e-8, grad_clip_norm=1.0)).result()
        means.append(sum(rewards) / len(rewards))
        console.print(f"step {step + 1:2d}  mean reward {means[-1]:.3f}  {'#' * round(40 * means[-1])}")

    assert means[-1] > means[0], f"the reward must rise; it went from {means[0]:.3f} to {means[-1]:.3f}"
    service.close("success").result()


if __name__ == "__main__":
    main()
