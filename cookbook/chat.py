"""Chat examples as training data: reads question/answer files and renders them with the tokenizer's own chat template.

Knows nothing of servers; the lessons import it.
"""

import json
from dataclasses import dataclass
from pathlib import Path

from tinker import types
from transformers import PreTrainedTokenizerBase

DATA = Path(__file__).parent / "data"


@dataclass(frozen=True)
class Example:
    question: str
    answer: str


def read_examples(name: str) -> list[Example]:
    """The examples of data/NAME.jsonl, one JSON object with a question and an answer a line."""
    return [Example(**json.loads(line)) for line in (DATA / f"{name}.jsonl").read_text().splitlines()]


def prompt_tokens(tokenizer: PreTrainedTokenizerBase, question: str) -> list[int]:
    """The question as the model expects to see it, up to the point where its answer begins."""
    turns = [{"role": "user", "content": question}]
    text = tokenizer.apply_chat_template(turns, add_generation_prompt=True, tokenize=False)
    return list(tokenizer.encode(text, add_special_tokens=False))


def datum(tokenizer: PreTrainedTokenizerBase, example: Example) -> types.Datum:
    """Position t of the input predicts token t + 1, so the targets are the tokens shifted by one. Only the answer has weight."""
    prompt = prompt_tokens(tokenizer, example.question)
    answer = [*tokenizer.encode(example.answer, add_special_tokens=False), tokenizer.eos_token_id]
    tokens = prompt + answer
    weights = [0.0] * (len(prompt) - 1) + [1.0] * len(answer)
    return types.Datum(
        model_input=types.ModelInput.from_ints(tokens[:-1]),
        loss_fn_inputs={"target_tokens": tokens[1:], "weights": weights},
    )


def ask(sampler, tokenizer: PreTrainedTokenizerBase, question: str, max_tokens: int = 32) -> str:
    """The model's most likely answer (temperature 0)."""
    params = types.SamplingParams(max_tokens=max_tokens, temperature=0.0)
    reply = sampler.sample(types.ModelInput.from_ints(prompt_tokens(tokenizer, question)), 1, params).result()
    return tokenizer.decode(reply.sequences[0].tokens, skip_special_tokens=True).strip()
