"""Lesson 303: distillation. A model learns to do without its instructions what it does with them.

The teacher is the base model with a system prompt, the student the same model without it. The teacher answers some questions; then it is
asked, at every token of its answers, for its K most likely tokens and their log-probabilities (`topk_prompt_logprobs`). These are the
student's targets: tensors of shape [rows, K], token ids and the probabilities as weights, so a row teaches a distribution where an
ordinary example teaches one token. Any sampler can be the teacher; give --teacher the tinker:// path of a checkpoint to take another
adapter.

Prints the divergence between teacher and student (KL, in nats a token), which falls, and what the student says before and after.

Run a server first (`tinsmith serve configs/cpu.yaml`), then: HF_HUB_OFFLINE=1 python cookbook/303_distillation_topk.py
"""

from dataclasses import dataclass

import numpy as np
import tinker
from chat import ask, prompt_tokens
from connect import API_KEY, options
from tinker import types
from transformers import PreTrainedTokenizerBase

INSTRUCTIONS = "You are a pirate captain. Answer every question in one short sentence that begins with Arr."
QUESTIONS = ["Who are you?", "What do bees make?", "Where do you live?", "What is the moon?"]


@dataclass(frozen=True)
class Lesson:
    """What the teacher said to a question. `ids`, `probabilities`: [answer tokens, K], the teacher's most likely tokens at each of them."""

    question: str
    answer: list[int]
    ids: np.ndarray
    probabilities: np.ndarray

    @property
    def entropy(self) -> float:
        """Of the targets, summed over tokens, in nats: what the cross entropy of a perfect student would be."""
        probabilities = self.probabilities[self.probabilities > 0]
        return float(-(probabilities * np.log(probabilities)).sum())


def main() -> None:
    parser = options(__doc__)
    parser.add_argument("--teacher", help="tinker:// path of a sampler checkpoint; the base model unless given")
    parser.add_argument("--topk", type=int, default=8)
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument("--learning-rate", type=float, default=1e-3)
    args = parser.parse_args()
    service = tinker.ServiceClient(base_url=args.base_url, api_key=API_KEY)
    teacher = service.create_sampling_client(model_path=args.teacher, base_model=args.base_model).result()
    student = service.create_lora_training_client(base_model=args.base_model, rank=16, seed=0).result()
    tokenizer = student.get_tokenizer()

    print(f"1. The teacher answers, and tells its {args.topk} most likely tokens at every place.")
    lessons = [teach(teacher, tokenizer, question, args.topk, seed) for seed, question in enumerate(QUESTIONS)]
    for lesson in lessons:
        print(f"   {lesson.question} {tokenizer.decode(lesson.answer, skip_special_tokens=True)!r}")

    print("2. The student sees the bare question; its targets are the teacher's distributions.")
    data = [student_datum(tokenizer, lesson) for lesson in lessons]
    num_tokens = sum(len(lesson.answer) for lesson in lessons)
    floor = sum(lesson.entropy for lesson in lessons)
    divergences = []
    for _ in range(args.steps):
        computed = student.forward_backward(data, "cross_entropy")
        student.optim_step(types.AdamParams(learning_rate=args.learning_rate, eps=1e-8, grad_clip_norm=1.0)).result()
        divergences.append((computed.result().metrics["loss:sum"] - floor) / num_tokens)
        print(f"   KL {divergences[-1]:.3f}", flush=True)
    assert divergences[-1] < 0.5 * divergences[0], f"the student must come nearer to its teacher: {divergences}"

    print("3. Before and after, without instructions:")
    base = service.create_sampling_client(base_model=args.base_model).result()
    taught = student.save_weights_and_get_sampling_client().result()
    for question in QUESTIONS:
        print(f"   {question}\n     {ask(base, tokenizer, question, 24)!r}\n     {ask(taught, tokenizer, question, 24)!r}")
    service.close("success").result()


def teach(teacher: tinker.SamplingClient, tokenizer: PreTrainedTokenizerBase, question: str, topk: int, seed: int) -> Lesson:
    turns = [{"role": "system", "content": INSTRUCTIONS}, {"role": "user", "content": question}]
    text = tokenizer.apply_chat_template(turns, add_generation_prompt=True, tokenize=False)
    prompt = list(tokenizer.encode(text, add_special_tokens=False))
    params = types.SamplingParams(max_tokens=24, temperature=0.7, seed=seed)
    answer = list(teacher.sample(types.ModelInput.from_ints(prompt), 1, params).result().sequences[0].tokens)

    whole = types.ModelInput.from_ints(prompt + answer)
    scores = {"include_prompt_logprobs": True, "topk_prompt_logprobs": topk, "prompt_logprobs_last_n": len(answer)}
    scored = teacher.sample(whole, 1, types.SamplingParams(max_tokens=1), **scores).result()
    rows = scored.topk_prompt_logprobs[-len(answer) :]  # the rows before are None: they were not asked for
    ids = np.array([[token for token, _ in row] for row in rows], np.int64)
    probabilities = np.exp(np.array([[logprob for _, logprob in row] for row in rows], np.float32))
    return Lesson(question, answer, ids, probabilities / probabilities.sum(axis=1, keepdims=True))  # of each row the K alone count


def student_datum(tokenizer: PreTrainedTokenizerBase, lesson: Lesson) -> types.Datum:
    """Position t of the input predicts row t of the targets. The prompt's rows have weight 0."""
    prompt = prompt_tokens(tokenizer, lesson.question)
    before = ((len(prompt) - 1, 0), (0, 0))
    return types.Datum(
        model_input=types.ModelInput.from_ints((prompt + lesson.answer)[:-1]),
        loss_fn_inputs={"target_tokens": np.pad(lesson.ids, before), "weights": np.pad(lesson.probabilities, before)},
    )


if __name__ == "__main__":
    main()
