"""Lesson 302: proximal policy optimization (PPO) on problems that a program makes and marks.

The problems are sums of the package `reasoning-gym`, which has a hundred such sources and marks the answers too: 1 for the bare number, a
part of it where the number stands among other words, 0 where it is missing. A step samples a group of answers a problem from the present
weights, gives the tokens of an answer the advantage (reward - mean reward of its group), and then makes several passes over the same
answers. After the first of them the weights are no longer those that sampled. That is what PPO is for: a token whose probability has moved
past the clip bounds, absolute ratios of 0.8 and 1.2, is not pushed further.

Prints the mean reward a step, which rises, and the rewards on problems that were never trained on, before and after.

Run a server first (`tinsmith serve configs/cpu.yaml`), then:
    pip install 'tinsmith[cookbook,reasoning]'
    HF_HUB_OFFLINE=1 python cookbook/302_ppo_math.py
"""

from collections.abc import Sequence
from dataclasses import dataclass

import reasoning_gym
import tinker
from chat import Example, datum, prompt_tokens
from connect import API_KEY, options
from tinker import types
from transformers import PreTrainedTokenizerBase

SUMS = {"min_terms": 2, "max_terms": 2, "min_digits": 1, "max_digits": 1}
CLIP = {"clip_low_threshold": 0.8, "clip_high_threshold": 1.2}
MAX_TOKENS = 16


@dataclass(frozen=True)
class Problem:
    """`entry`: as its source made it, with question and answer."""

    source: reasoning_gym.dataset.ProceduralDataset
    entry: dict
    prompt: list[int]

    def reward(self, answer: str) -> float:
        return self.source.score_answer(answer.strip(), self.entry)


@dataclass(frozen=True)
class Try:
    """One sampled answer. `advantage`: its reward less the mean of its group."""

    prompt: list[int]
    sequence: types.SampledSequence
    reward: float
    advantage: float

    def datum(self) -> types.Datum:
        """The prompt's rows carry advantage 0: only what the model said is reinforced."""
        num_prompt_rows = len(self.prompt) - 1
        tokens = self.prompt + list(self.sequence.tokens)
        return types.Datum(
            model_input=types.ModelInput.from_ints(tokens[:-1]),
            loss_fn_inputs={
                "target_tokens": tokens[1:],
                "logprobs": [0.0] * num_prompt_rows + list(self.sequence.logprobs),
                "advantages": [0.0] * num_prompt_rows + [self.advantage] * len(self.sequence.tokens),
            },
        )


def main() -> None:
    parser = options(__doc__)
    parser.add_argument("--problems", type=int, default=4, help="that are trained on")
    parser.add_argument("--group", type=int, default=8, help="answers sampled a problem")
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--passes", type=int, default=2, help="over the answers of one step")
    parser.add_argument("--learning-rate", type=float, default=3e-4)
    parser.add_argument("--warm-up", type=int, default=0, help="supervised steps before; a model that never earns a reward needs them")
    args = parser.parse_args()
    service = tinker.ServiceClient(base_url=args.base_url, api_key=API_KEY)
    training = service.create_lora_training_client(base_model=args.base_model, rank=16, seed=0).result()
    tokenizer = training.get_tokenizer()

    print("1. Problems, made by a program from a seed.")
    problems = make_problems(tokenizer, args.problems, seed=3)
    others = make_problems(tokenizer, 8, seed=4)
    print(f"   {problems[0].entry['question']} {problems[0].entry['answer']}")
    if args.warm_up:
        training = warmed_up(service, training, tokenizer, problems, args.warm_up)
    before = mean_reward(training, tokenizer, others)

    print("2. Sample, mark, train; again and again.")
    means = []
    for step in range(args.steps):
        tries = attempt(training, tokenizer, problems, args.group, seed=1000 * step)
        means.append(sum(one.reward for one in tries) / len(tries))
        print(f"   step {step + 1:2d}  mean reward {means[-1]:.3f}  {'#' * round(40 * means[-1])}", flush=True)
        improve(training, tries, args.passes, args.learning_rate)
    half = len(means) // 2
    assert sum(means[-half:]) > sum(means[:half]), f"the reward must rise: {means}"

    print("3. On problems that were not trained on:")
    print(f"   mean reward {before:.3f} -> {mean_reward(training, tokenizer, others):.3f}")
    service.close("success").result()


def make_problems(tokenizer: PreTrainedTokenizerBase, num_problems: int, seed: int) -> list[Problem]:
    source = reasoning_gym.create_dataset("chain_sum", size=num_problems, seed=seed * 1000, **SUMS)
    return [Problem(source, entry, prompt_tokens(tokenizer, entry["question"])) for entry in source]


def warmed_up(
    service: tinker.ServiceClient,
    training: tinker.TrainingClient,
    tokenizer: PreTrainedTokenizerBase,
    problems: Sequence[Problem],
    steps: int,
) -> tinker.TrainingClient:
    """Teach the form of an answer by examples. The optimizer is new then: what it knows of their gradients says nothing of others."""
    examples = [datum(tokenizer, Example(problem.entry["question"], problem.entry["answer"])) for problem in problems]
    for _ in range(steps):
        training.forward_backward(examples, "cross_entropy")
        training.optim_step(types.AdamParams(learning_rate=5e-3, eps=1e-8, grad_clip_norm=1.0)).result()
    return service.create_training_client_from_state(training.save_state("warm").result().path).result()


def attempt(
    training: tinker.TrainingClient, tokenizer: PreTrainedTokenizerBase, problems: Sequence[Problem], group: int, seed: int
) -> list[Try]:
    """A group of answers a problem, from the present weights."""
    sampler = training.save_weights_and_get_sampling_client().result()
    params = [types.SamplingParams(max_tokens=MAX_TOKENS, seed=seed + row) for row in range(len(problems))]
    futures = [
        sampler.sample(types.ModelInput.from_ints(problem.prompt), group, these) for problem, these in zip(problems, params, strict=True)
    ]
    tries = []
    for problem, future in zip(problems, futures, strict=True):
        sequences = future.result().sequences
        rewards = [problem.reward(tokenizer.decode(sequence.tokens, skip_special_tokens=True)) for sequence in sequences]
        mean = sum(rewards) / len(rewards)
        tries += [Try(problem.prompt, sequence, got, got - mean) for sequence, got in zip(sequences, rewards, strict=True)]
    return tries


def improve(training: tinker.TrainingClient, tries: Sequence[Try], passes: int, learning_rate: float) -> None:
    """`logprobs` stay those of the sampler in every pass: the ratios are taken against them."""
    batch = [one.datum() for one in tries if one.advantage]  # a group whose answers earned all the same teaches nothing
    if not batch:
        return
    for _ in range(passes):
        training.forward_backward(batch, "ppo", CLIP)
        training.optim_step(types.AdamParams(learning_rate=learning_rate, eps=1e-8, grad_clip_norm=1.0)).result()


def mean_reward(training: tinker.TrainingClient, tokenizer: PreTrainedTokenizerBase, problems: Sequence[Problem]) -> float:
    """Of the most likely answers."""
    sampler = training.save_weights_and_get_sampling_client().result()
    params = types.SamplingParams(max_tokens=MAX_TOKENS, temperature=0.0)
    futures = [sampler.sample(types.ModelInput.from_ints(problem.prompt), 1, params) for problem in problems]
    texts = [tokenizer.decode(future.result().sequences[0].tokens, skip_special_tokens=True) for future in futures]
    return sum(problem.reward(text) for problem, text in zip(problems, texts, strict=True)) / len(problems)


if __name__ == "__main__":
    main()
