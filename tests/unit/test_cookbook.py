"""The cookbook's parts that need no server: the examples, how they are rendered, and what the toy reward rewards."""

import importlib.util
import math
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType, SimpleNamespace

import numpy as np
import pytest
import torch

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


def test_the_loss_of_a_pair_is_what_its_formula_says(lesson: Load) -> None:
    """Policy sums -1.7 and -2.1, references -1.6 and -2.1, beta 0.1: a margin of -0.01. Only rows with weight count."""
    dpo = lesson("301_dpo_custom_loss")
    chosen, rejected = (SimpleNamespace(loss_fn_inputs={"weights": SimpleNamespace(data=[0.0, 1.0, 1.0])}) for _ in range(2))
    logprobs = [torch.tensor([-9.0, -1.0, -0.7], requires_grad=True), torch.tensor([-5.0, -1.1, -1.0], requires_grad=True)]
    loss, metrics = dpo.Dpo([-1.6, -2.1])([chosen, rejected], logprobs)
    loss.backward()
    assert loss.item() == pytest.approx(0.69815968, rel=1e-5)
    assert metrics == {"dpo/margin:mean": pytest.approx(-0.01, rel=1e-4), "dpo/accuracy:mean": 0.0}
    assert logprobs[0].grad.tolist() == pytest.approx([0.0, -0.05025, -0.05025], rel=1e-5)
    assert logprobs[1].grad.tolist() == pytest.approx([0.0, 0.05025, 0.05025], rel=1e-5)


def test_a_problem_marks_the_bare_number_best(lesson: Load) -> None:
    ppo = lesson("302_ppo_math")
    (problem,) = ppo.make_problems(LetterTokenizer(), 1, seed=3)
    right = problem.entry["answer"]
    assert [problem.reward(answer) for answer in (f" {right}\n", f"It is {right}.", "no idea")] == [
        1.0,
        pytest.approx(len(right) / len(f"It is {right}.")),
        0.0,
    ]


def test_of_a_try_only_what_the_model_said_has_an_advantage(lesson: Load) -> None:
    one = lesson("302_ppo_math").Try([5, 6, 7], SimpleNamespace(tokens=[8, 9], logprobs=[-0.1, -0.2]), reward=1.0, advantage=0.5)
    inputs = one.datum().loss_fn_inputs
    assert list(inputs["target_tokens"].data) == [6, 7, 8, 9]
    assert list(inputs["advantages"].data) == [0.0, 0.0, 0.5, 0.5]


def test_the_targets_of_a_student_stand_where_its_answer_begins(lesson: Load) -> None:
    distillation = lesson("303_distillation_topk")
    half = np.array([[0.5, 0.5], [1.0, 0.0]], np.float32)
    taught = distillation.Lesson("ab", [7, 8], np.array([[7, 1], [8, 2]]), half)
    datum = distillation.student_datum(LetterTokenizer(), taught)
    targets, weights = (datum.loss_fn_inputs[name].to_numpy() for name in ("target_tokens", "weights"))
    assert datum.model_input.to_ints() == [ord("["), ord("a"), ord("b"), ord("]"), 7]
    assert targets.tolist() == [[0, 0]] * 3 + [[7, 1], [8, 2]]
    assert weights.tolist() == [[0.0, 0.0]] * 3 + half.tolist()
    assert taught.entropy == pytest.approx(math.log(2))


def test_an_agent_does_what_the_model_asks_for_and_ends_when_it_asks_for_nothing(lesson: Load) -> None:
    agent = lesson("305_openai_agent")
    call = SimpleNamespace(id="call_9", function=SimpleNamespace(name="count", arguments='{"fruit": "plums"}'))
    replies = [FakeMessage(None, [call]), FakeMessage("We have 31.", None)]
    asked: list[list[dict[str, object]]] = []

    def create(*, messages: list[dict[str, object]], **_: object) -> SimpleNamespace:
        asked.append(list(messages))
        return SimpleNamespace(choices=[SimpleNamespace(message=replies[len(asked) - 1])])

    client = SimpleNamespace(chat=SimpleNamespace(completions=SimpleNamespace(create=create)))
    turns = agent.run(client, "model", agent.question("plums"))
    assert [turn["role"] for turn in turns] == ["user", "assistant", "tool", "assistant"]
    assert turns[2] == {"role": "tool", "tool_call_id": "call_9", "content": "31"}
    assert [len(each) for each in asked] == [1, 3]


class FakeMessage:
    """An answer of OpenAI's client."""

    def __init__(self, content: str | None, tool_calls: list[SimpleNamespace] | None) -> None:
        self.content = content
        self.tool_calls = tool_calls

    def model_dump(self, **_: object) -> dict[str, object]:
        return {"role": "assistant", "content": self.content}
