"""Lesson 301: a loss of your own. Direct preference optimization (DPO), written here in PyTorch, trained over there.

`forward_backward_custom` asks the server for the log-probabilities of the target tokens, runs your function on them in this process, and
sends the derivative back as the weights of one more pass: any loss that is a function of log-probabilities can be trained so, at the
price of a second forward pass. The loss of DPO (Rafailov et al. 2023, equation 7) is, of a pair of answers to one question,

    -log sigmoid(beta * ((chosen - its reference) - (rejected - its reference)))

where each term is the log-probability of an answer as a whole, and the reference is the model before training.

Prints the loss, which starts at log 2 a pair and falls, and how much more likely every chosen answer got than its rejected one.

Run a server first (`tinsmith serve configs/cpu.yaml`), then: HF_HUB_OFFLINE=1 python cookbook/301_dpo_custom_loss.py
"""

import math
from dataclasses import dataclass

import tinker
import torch
from chat import Example, datum
from connect import API_KEY, options
from tinker import types
from transformers import PreTrainedTokenizerBase

PREFERENCES = [  # question, the answer that we like, one that we do not: short is what we like
    ("What do bees make?", "Honey.", "Well, that is an interesting question about bees."),
    ("How many legs does a spider have?", "Eight.", "Spiders are fascinating animals, as you may know."),
    ("What colour is the sky?", "Blue.", "It depends on many things, such as the weather."),
    ("What is 2 + 3?", "Five.", "Let me think about numbers for a while first."),
]
BETA = 0.1


@dataclass(frozen=True)
class Dpo:
    """The loss of neighbouring pairs: chosen, rejected, chosen, rejected ... `references`: of each answer, before training."""

    references: list[float]

    def __call__(self, data: list[types.Datum], logprobs: list[torch.Tensor]) -> tuple[torch.Tensor, dict[str, float]]:
        """The sum over pairs, and the metrics. `logprobs`: one tensor a datum, one number a target token, the prompt's included."""
        answers = [(weights_of(item) * row).sum() for item, row in zip(data, logprobs, strict=True)]
        gains = torch.stack(answers) - torch.tensor(self.references)
        margins = BETA * (gains[::2] - gains[1::2])
        metrics = {"dpo/margin:mean": margins.mean().item(), "dpo/accuracy:mean": (margins > 0).float().mean().item()}
        return -torch.nn.functional.logsigmoid(margins).sum(), metrics


def main() -> None:
    parser = options(__doc__)
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--learning-rate", type=float, default=5e-4)
    args = parser.parse_args()
    service = tinker.ServiceClient(base_url=args.base_url, api_key=API_KEY)
    training = service.create_lora_training_client(base_model=args.base_model, rank=8, seed=1).result()
    pairs = preference_data(training.get_tokenizer())

    print("1. The reference: a forward pass of the new adapter, which does not change the model yet.")
    references = answer_logprobs(training, pairs)
    print(f"   {len(pairs)} answers, log-probabilities from {min(references):.1f} to {max(references):.1f}")

    print("2. Train. The loss is computed in this process; the step is sent before its result is read.")
    loss = Dpo(references)
    steps = []
    for _ in range(args.steps):
        computed = training.forward_backward_custom(pairs, loss)
        stepped = training.optim_step(types.AdamParams(learning_rate=args.learning_rate, eps=1e-8, grad_clip_norm=10.0))
        metrics = computed.result().metrics
        stepped.result()
        steps.append(metrics)
        print(f"   loss {metrics['loss:sum']:.4f}, margin {metrics['dpo/margin:mean']:.3f}")

    print("3. A model that has learned nothing prefers neither answer: the first loss is log 2 a pair.")
    assert math.isclose(steps[0]["loss:sum"], len(PREFERENCES) * math.log(2), rel_tol=1e-4), steps[0]
    assert steps[-1]["loss:sum"] < steps[0]["loss:sum"], "the loss must fall"

    print("4. Now every chosen answer has gained on the rejected one.")
    gains = [after - before for before, after in zip(references, answer_logprobs(training, pairs), strict=True)]
    for (question, *_), chosen, rejected in zip(PREFERENCES, gains[::2], gains[1::2], strict=True):
        print(f"   {question:36} chosen {chosen:+7.2f}, rejected {rejected:+7.2f}")
        assert chosen > rejected, question
    service.close("success").result()


def preference_data(tokenizer: PreTrainedTokenizerBase) -> list[types.Datum]:
    """Chosen, rejected, chosen, rejected ...; only the answers have weight."""
    return [datum(tokenizer, Example(question, answer)) for question, *answers in PREFERENCES for answer in answers]


def answer_logprobs(training: tinker.TrainingClient, data: list[types.Datum]) -> list[float]:
    """Of each answer as a whole, without a gradient."""
    outputs = training.forward(data, "cross_entropy").result().loss_fn_outputs
    return [float((weights_of(item) * torch.tensor(out["logprobs"].data)).sum()) for item, out in zip(data, outputs, strict=True)]


def weights_of(item: types.Datum) -> torch.Tensor:
    return torch.tensor(item.loss_fn_inputs["weights"].data)


if __name__ == "__main__":
    main()
