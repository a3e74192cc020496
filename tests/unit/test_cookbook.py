"""The cookbook's parts that need no server: the examples, how they are rendered, and what the toy reward rewards."""

import importlib.util
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest

COOKBOOK = Path(__file__).resolve().parents[2] / "cookbook"
EOS = 2

Load = Callable[[str], ModuleType]


class LetterTokenizer:
    """One token a character; the template is a pair of brackets."""

    eos_token_id = EOS

    def apply_chat_template(self, turns: list[dict[str, str]], *, add_generation_prompt: bool, tokenize: bool) -> str:
        assert add_generation_prompt
        assert not tokenize
        return "".join(f"[{turn['content']}]" for turn in turns)

    def encode(self, text: str, *, add_special_tokens: bool) -> list[int]:
        assert not add_special_tokens
        return [ord(letter) for letter in text]


@pytest.fixture(scope="module")
def lesson() -> Iterator[Load]:
    """Loads cookbook/NAME.py as running it would."""
    sys.path.insert(0, str(COOKBOOK))
    loaded: dict[str, ModuleType] = {}

    def load(name: str) -> ModuleType:
        if name not in loaded:
            spec = importlib.util.spec_from_file_location(name, COOKBOOK / f"{name}.py")
            assert spec is not None
            assert spec.loader is not None
            loaded[name] = sys.modules[name] = importlib.util.module_from_spec(spec)
            spec.loader.exec_module(loaded[name])
        return loaded[name]

    yield load
    sys.path.remove(str(COOKBOOK))
    for name in loaded:
        del sys.modules[name]


def test_only_the_answer_and_its_end_have_weight(lesson: Load) -> None:
    chat = lesson("chat")
    datum = chat.datum(LetterTokenizer(), chat.Example("ab", "xyz"))
    inputs = datum.model_input.to_ints()
    targets = list(datum.loss_fn_inputs["target_tokens"].data)
    weights = list(datum.loss_fn_inputs["weights"].data)
    assert inputs == [ord(letter) for letter in "[ab]xyz"]
    assert targets == [*inputs[1:], EOS]
    assert [target for target, weight in zip(targets, weights, strict=True) if weight] == [ord("x"), ord("y"), ord("z"), EOS]
    assert set(weights) == {0.0, 1.0}


def test_the_examples_are_enough_and_leave_the_probed_fact_out(lesson: Load) -> None:
    chat, sft = lesson("chat"), lesson("101_sft")
    identity, general = chat.read_examples("identity"), chat.read_examples("general")
    assert len(identity) >= 24
    assert len(general) >= len(identity)
    assert all("Tinsmith" in example.answer or "me" in example.answer or "HTTP" in example.answer for example in identity)
    everything = " ".join(f"{example.question} {example.answer}" for example in identity + general)
    assert "France" in sft.FACT
    assert "France" not in everything
    assert "Paris" not in everything


def test_batches_are_endless_and_each_epoch_is_new(lesson: Load) -> None:
    sft = lesson("101_sft")
    batches = sft.shuffled_batches(list(range(6)), 3)
    epochs = [next(batches) + next(batches) for _ in range(4)]
    assert all(sorted(epoch) == list(range(6)) for epoch in epochs)
    assert len({tuple(epoch) for epoch in epochs}) > 1


@pytest.mark.parametrize(
    ("answer", "expected"),
    [("7", 1.0), (" 7\n", 1.0), ("3 + 4 is 7.", 1 / 11), ("8", 0.0), ("7 or 8", 0.0), ("seven", 0.0), ("", 0.0)],
)
def test_the_reward_is_the_share_of_the_answer_that_is_right(lesson: Load, answer: str, expected: float) -> None:
    assert lesson("103_rl").reward(answer, 7) == pytest.approx(expected)


def test_the_prompt_is_not_reinforced(lesson: Load) -> None:
    datum = lesson("103_rl").datum([5, 6, 7], SimpleNamespace(tokens=[8, 9], logprobs=[-0.1, -0.2]), 0.5)
    assert list(datum.loss_fn_inputs["target_tokens"].data) == [6, 7, 8, 9]
    assert list(datum.loss_fn_inputs["advantages"].data) == [0.0, 0.0, 0.5, 0.5]
    assert list(datum.loss_fn_inputs["logprobs"].data) == pytest.approx([0.0, 0.0, -0.1, -0.2])
