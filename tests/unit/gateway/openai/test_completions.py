"""POST /v1/completions."""

import math
from itertools import chain

import pytest

from tests.fakes.face import BASE
from tests.unit.gateway.openai.scene import END, Scene, outcome
from tinsmith.protocol.sampling import SampledSequence, SamplingParams, StopReason

PATH = "/completions"


async def test_the_options_reach_the_sampler(scene: Scene) -> None:
    options = {
        "max_tokens": 7,
        "temperature": 0.5,
        "top_p": 0.9,
        "top_k": 3,
        "seed": 11,
        "n": 2,
        "stop": ["a", "b"],
        "frequency_penalty": 0.25,
        "presence_penalty": -1.5,
        "logit_bias": {"5": 2.5},
        "logprobs": 3,
    }
    sample = await scene.asked(PATH, prompt=[5, 6], **options)
    assert sample.prompt.tokens == [5, 6]
    assert (sample.num_samples, sample.adapter, sample.topk_sample_logprobs) == (2, None, 3)
    assert sample.params == SamplingParams(
        seed=11,
        max_tokens=7,
        temperature=0.5,
        top_p=0.9,
        top_k=3,
        stop=("a", "b"),
        frequency_penalty=0.25,
        presence_penalty=-1.5,
        logit_bias={5: 2.5},
    )


async def test_what_is_left_out_has_that_apis_defaults(scene: Scene) -> None:
    sample = await scene.asked(PATH, prompt=[5, 6], stop=None, logprobs=None)
    assert (sample.num_samples, sample.params.max_tokens, sample.params.temperature, sample.params.stop) == (1, 16, 1.0, None)
    other = await scene.asked(PATH, prompt=[5, 6])
    assert sample.params.seed != other.params.seed


async def test_the_default_bound_ends_where_the_context_does(scene: Scene) -> None:
    room = scene.face.services.base_models[BASE].max_context
    assert (await scene.asked(PATH, prompt=[5] * (room - 3))).params.max_tokens == 3


async def test_a_text_is_tokenized_and_its_answer_is_text_without_special_tokens(scene: Scene) -> None:
    tokens = scene.tokenizer.encode("Two words")
    assert (await scene.asked(PATH, prompt="Two words")).prompt.tokens == tokens
    answer = await scene.answer(PATH, scene.drawn(" and more" + END), prompt="Two words", cached=1)
    (choice,) = answer["choices"]
    assert (answer["object"], answer["model"], choice["text"]) == ("text_completion", BASE, " and more")
    assert (choice["index"], choice["finish_reason"], choice["logprobs"]) == (0, "stop", None)
    num_drawn = len(scene.tokenizer.encode(" and more" + END))
    assert answer["usage"] == {
        "prompt_tokens": len(tokens),
        "completion_tokens": num_drawn,
        "total_tokens": len(tokens) + num_drawn,
        "prompt_tokens_details": {"cached_tokens": 1},
    }
    assert "token_ids" not in choice


async def test_each_of_several_choices_is_told_and_counted(scene: Scene) -> None:
    drawn = [scene.drawn(" one"), scene.drawn(" two", StopReason.LENGTH)]
    answer = await scene.answer(PATH, *drawn, prompt=[5, 6], n=2)
    told = [(choice["index"], choice["text"], choice["finish_reason"]) for choice in answer["choices"]]
    assert told == [(0, " one", "stop"), (1, " two", "length")]
    assert answer["usage"]["prompt_tokens"] == 2
    assert answer["usage"]["completion_tokens"] == 2


async def test_several_prompts_are_a_sample_each_and_their_choices_follow_one_another(scene: Scene) -> None:
    asking = scene.begin(PATH, prompt=["a", "b"], n=2, seed=3)
    held = [await scene.take() for _ in range(2)]
    assert [sample.params.seed for _, sample in held] == [3, 3]
    for entry, sample in reversed(held):
        text = scene.tokenizer.decode(sample.prompt.tokens)
        await scene.settle(entry, outcome(scene.drawn(f" {text}x"), scene.drawn(f" {text}y")))
    answer = (await asking).json()
    assert [(choice["index"], choice["text"]) for choice in answer["choices"]] == [(0, " ax"), (1, " ay"), (2, " bx"), (3, " by")]
    assert answer["usage"]["prompt_tokens"] == 2


async def test_a_text_ends_before_its_stop_string(scene: Scene) -> None:
    answer = await scene.answer(PATH, scene.drawn(" red, blue"), prompt=[5], stop=", b")
    (choice,) = answer["choices"]
    assert (choice["text"], choice["finish_reason"]) == (" red", "stop")


async def test_token_ids_are_told_on_request_as_they_were_served(scene: Scene) -> None:
    drawn = scene.drawn(" red" + END)
    answer = await scene.answer(PATH, drawn, prompt=[5, 6], return_token_ids=True, logprobs=0)
    (choice,) = answer["choices"]
    assert (choice["token_ids"], choice["prompt_token_ids"]) == (drawn.tokens, [5, 6])
    assert choice["logprobs"] == {
        "tokens": [" red", END],
        "token_logprobs": [-1.0, -2.0],
        "top_logprobs": [{" red": -1.0}, {END: -2.0}],
        "text_offset": [0, 4],
    }


async def test_alternatives_are_told_with_the_token_that_was_drawn(scene: Scene) -> None:
    red, blue, green = (scene.tokenizer.encode(text)[0] for text in (" red", " blue", " green"))
    drawn = SampledSequence([red], [-math.inf], StopReason.LENGTH, [[(blue, -0.5), (green, -1.5)]])
    answer = await scene.answer(PATH, drawn, prompt=[5], logprobs=2)
    logprobs = answer["choices"][0]["logprobs"]
    assert logprobs["top_logprobs"] == [{" red": -9999.0, " blue": -0.5, " green": -1.5}]
    assert logprobs["token_logprobs"] == [-9999.0]


async def test_a_stream_tells_what_the_whole_answer_would(scene: Scene) -> None:
    drawn = scene.drawn(" red, green, blue and then some" + END)
    body = {"prompt": [5, 6], "stop": " then", "logprobs": 0, "return_token_ids": True}
    whole = (await scene.answer(PATH, drawn, **body))["choices"][0]
    *chunks, done = await scene.events(PATH, drawn, pieces=(1, 2, 1), **body)
    assert done is None
    choices = [chunk["choices"][0] for chunk in chunks]
    assert len(choices) > 3
    assert "".join(choice["text"] for choice in choices) == whole["text"] == " red, green, blue and"
    assert [choice["finish_reason"] for choice in choices] == [None] * (len(choices) - 1) + ["stop"]
    assert [*chain(*(choice["token_ids"] for choice in choices))] == whole["token_ids"]
    assert [choice.get("prompt_token_ids") for choice in choices] == [[5, 6]] + [None] * (len(choices) - 1)
    offsets = [*chain(*(choice["logprobs"]["text_offset"] for choice in choices if choice["logprobs"]))]
    assert offsets == whole["logprobs"]["text_offset"]
    assert {chunk["id"] for chunk in chunks} == {chunks[0]["id"]}
    assert all("usage" not in chunk for chunk in chunks)


async def test_a_stream_tells_its_usage_in_a_last_chunk_on_request(scene: Scene) -> None:
    drawn = scene.drawn(" red" + END)
    *chunks, last, done = await scene.events(PATH, drawn, prompt=[5, 6], stream_options={"include_usage": True})
    assert done is None
    assert [chunk["usage"] for chunk in chunks] == [None] * len(chunks)
    assert last["choices"] == []
    assert (last["usage"]["prompt_tokens"], last["usage"]["completion_tokens"], last["usage"]["total_tokens"]) == (2, 2, 4)


@pytest.mark.parametrize(
    ("changes", "param"),
    [
        ({"prompt": None}, "prompt"),
        ({"prompt": []}, "prompt"),
        ({"prompt": [-1]}, "prompt"),
        ({"prompt": [True]}, "prompt"),
        ({"prompt": [[1], "a"]}, "prompt"),
        ({"prompt": [49152]}, "prompt"),
        ({"prompt": ""}, "prompt"),
        ({"n": 0}, "n"),
        ({"n": 129}, "n"),
        ({"temperature": 2.1}, "temperature"),
        ({"temperature": "1"}, "temperature"),
        ({"top_p": 0}, "top_p"),
        ({"stop": [""]}, "stop"),
        ({"stop": ["a"] * 65}, "stop"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"logprobs": 6}, "logprobs"),
        ({"logprobs": True}, "logprobs"),
        ({"presence_penalty": 3}, "presence_penalty"),
        ({"logit_bias": {"a": 1}}, "logit_bias.a.[key]"),
        ({"logit_bias": {"5": 101}}, "logit_bias.5"),
        ({"logit_bias": {"49152": 1}}, "logit_bias"),
        ({"seed": 2**63}, "seed"),
        ({"stream_options": {"include_usage": True}}, "stream_options"),
        ({"colour": "red"}, "colour"),
        ({"messages": []}, "messages"),
    ],
)
async def test_a_refused_request_names_its_field_and_leaves_nothing(scene: Scene, changes: dict[str, object], param: str) -> None:
    kept = scene.face.num_kept()
    response = await scene.post(PATH, **({"prompt": [5, 6]} | changes))
    error = response.json()["error"]
    assert (response.status_code, error["type"], error["param"]) == (400, "invalid_request_error", param), error
    assert error["message"]
    assert scene.face.num_kept() == kept


@pytest.mark.parametrize(("name", "value"), [("echo", True), ("best_of", 2), ("suffix", "a"), ("response_format", {"type": "json_object"})])
async def test_a_documented_option_that_is_not_served_is_refused_by_name(scene: Scene, name: str, value: object) -> None:
    response = await scene.post(PATH, prompt=[5], **{name: value})
    error = response.json()["error"]
    assert (response.status_code, error["code"], error["param"]) == (400, "unsupported_parameter", name)


async def test_what_asks_for_nothing_may_be_sent(scene: Scene) -> None:
    sample = await scene.asked(PATH, prompt=[5], echo=False, best_of=1, suffix="", user="somebody", store=False, n=None)
    assert sample.num_samples == 1


@pytest.mark.parametrize("body", [{"prompt": [5] * 8193}, {"prompt": [5] * 8000, "max_tokens": 200}, {"prompt": "a " * 900_000}])
async def test_a_request_beyond_the_context_is_told_so(scene: Scene, body: dict[str, object]) -> None:
    assert scene.face.services.base_models[BASE].max_context <= 8192
    response = await scene.post(PATH, **body)
    assert (response.status_code, response.json()["error"]["code"]) == (400, "context_length_exceeded")
    assert response.json()["error"]["param"] == "prompt"
