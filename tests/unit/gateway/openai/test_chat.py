"""POST /v1/chat/completions."""

import json
from itertools import chain
from typing import Any

import pytest

from tests.fakes.face import BASE
from tests.unit.gateway.openai.scene import CHAT, END, Scene, outcome
from tinsmith.protocol.futures import Outcome
from tinsmith.protocol.sampling import SampledSequence, StopReason

PATH = "/chat/completions"
WEATHER: dict[str, Any] = {
    "type": "function",
    "function": {
        "name": "weather",
        "description": "Of a town.",
        "parameters": {"type": "object", "properties": {"town": {"type": "string", "default": None}}},
    },
}
CALL = '<tool_call>\n{"name": "weather", "arguments": {"town": "Zürich"}}\n</tool_call>'


def prompt_text(scene: Scene, tokens: list[int]) -> str:
    return scene.tokenizer.decode(tokens)


async def test_messages_are_rendered_by_the_models_own_template(scene: Scene) -> None:
    messages = [
        {"role": "developer", "content": "Be brief."},
        {"role": "user", "content": [{"type": "text", "text": "One"}, {"type": "text", "text": "two?"}]},
        {"role": "assistant", "content": "Three.", "refusal": None, "tool_calls": None},
        {"role": "user", "content": "And?"},
    ]
    sample = await scene.asked(PATH, messages=messages)
    assert prompt_text(scene, sample.prompt.tokens) == (
        f"<|im_start|>system\nBe brief.{END}\n<|im_start|>user\nOne\ntwo?{END}\n<|im_start|>assistant\nThree.{END}\n"
        f"<|im_start|>user\nAnd?{END}\n<|im_start|>assistant\n"
    )
    assert (sample.params.max_tokens, sample.num_samples, sample.params.stop) == (None, 1, None)


@pytest.mark.parametrize("body", [{"max_tokens": 5}, {"max_completion_tokens": 5}, {"max_tokens": 5, "max_completion_tokens": 5}])
async def test_either_name_bounds_the_tokens(scene: Scene, body: dict[str, object]) -> None:
    assert (await scene.asked(PATH, messages=CHAT, **body)).params.max_tokens == 5


async def test_an_answer(scene: Scene) -> None:
    drawn = scene.drawn("Blue." + END)
    answer = await scene.answer(PATH, drawn, scene.drawn("Red", StopReason.LENGTH), messages=CHAT, n=2)
    assert (answer["object"], answer["model"]) == ("chat.completion", BASE)
    assert answer["choices"] == [
        {"index": 0, "message": {"role": "assistant", "content": "Blue.", "refusal": None}, "logprobs": None, "finish_reason": "stop"},
        {"index": 1, "message": {"role": "assistant", "content": "Red", "refusal": None}, "logprobs": None, "finish_reason": "length"},
    ]
    num_prompt = len((await scene.asked(PATH, messages=CHAT)).prompt.tokens)
    assert answer["usage"]["prompt_tokens"] == num_prompt
    assert answer["usage"]["completion_tokens"] == len(drawn.tokens) + 1
    assert answer["usage"]["total_tokens"] == num_prompt + len(drawn.tokens) + 1


async def test_log_probs_and_ids_are_one_to_one_with_the_tokens(scene: Scene) -> None:
    blue, red = (scene.tokenizer.encode(text)[0] for text in ("Blue", "Red"))
    end = scene.tokenizer.encode(END)[0]
    drawn = SampledSequence([blue, end], [-0.5, -0.25], StopReason.STOP, [[(blue, -0.5), (red, -1.5)], None])
    asked = await scene.asked(PATH, messages=CHAT, logprobs=True, top_logprobs=2)
    assert asked.topk_sample_logprobs == 2
    answer = await scene.answer(PATH, drawn, messages=CHAT, logprobs=True, top_logprobs=2, return_token_ids=True)
    (choice,) = answer["choices"]
    assert (choice["token_ids"], answer["prompt_token_ids"]) == ([blue, end], asked.prompt.tokens)
    tops = [
        {"token": "Blue", "logprob": -0.5, "bytes": [66, 108, 117, 101]},
        {"token": "Red", "logprob": -1.5, "bytes": [82, 101, 100]},
    ]
    assert choice["logprobs"]["content"][0] == tops[0] | {"top_logprobs": tops}
    assert (choice["logprobs"]["content"][1]["token"], choice["logprobs"]["content"][1]["top_logprobs"]) == (END, [])


async def test_half_a_character_has_no_bytes_of_its_own(scene: Scene) -> None:
    tokens = scene.tokenizer.encode("🦆")
    assert len(tokens) > 1
    drawn = SampledSequence(tokens, [-1.0] * len(tokens), StopReason.LENGTH)
    answer = await scene.answer(PATH, drawn, messages=CHAT, logprobs=True)
    assert answer["choices"][0]["message"]["content"] == "🦆"
    assert [entry["bytes"] for entry in answer["choices"][0]["logprobs"]["content"]] == [None] * len(tokens)


async def test_a_stream_begins_with_the_role_and_tells_what_the_whole_answer_would(scene: Scene) -> None:
    drawn = scene.drawn("Blue, I think 🦆." + END)
    body = {"messages": CHAT, "logprobs": True, "return_token_ids": True}
    answer = await scene.answer(PATH, drawn, **body)
    whole = answer["choices"][0]
    first, *chunks, done = await scene.events(PATH, drawn, pieces=(1,) * (len(drawn.tokens) - 2), **body)
    assert done is None
    assert (first["object"], first["choices"][0]["delta"]) == ("chat.completion.chunk", {"role": "assistant", "content": ""})
    assert first["prompt_token_ids"] == answer["prompt_token_ids"]
    choices = [chunk["choices"][0] for chunk in chunks]
    assert "".join(choice["delta"].get("content", "") for choice in choices) == whole["message"]["content"] == "Blue, I think 🦆."
    assert [*chain(*(choice.get("token_ids", []) for choice in choices))] == whole["token_ids"] == drawn.tokens
    assert [*chain(*(choice["logprobs"]["content"] for choice in choices if choice["logprobs"]))] == whole["logprobs"]["content"]
    assert choices[-1] == {"index": 0, "delta": {}, "logprobs": None, "finish_reason": "stop"}


async def test_alternatives_in_a_stream_come_with_the_result(scene: Scene) -> None:
    blue = scene.tokenizer.encode("Blue")[0]
    drawn = SampledSequence([blue], [-0.5], StopReason.LENGTH, [[(blue, -0.5)]])
    asking = scene.begin(PATH, messages=CHAT, stream=True, logprobs=True, top_logprobs=1)
    entry, _ = await scene.take()
    assert entry.reply_to == "", "nobody listens for tokens that would come without them"
    await scene.settle(entry, outcome(drawn))
    choices = [json.loads(line[6:])["choices"][0] for line in (await asking).text.split("\n\n") if line.startswith("data: {")]
    assert [entry["top_logprobs"][0]["token"] for choice in choices if choice["logprobs"] for entry in choice["logprobs"]["content"]] == [
        "Blue"
    ]


async def test_a_stream_of_several_choices_tells_each(scene: Scene) -> None:
    drawn = [scene.drawn("One" + END), scene.drawn("Two" + END)]
    *chunks, done = await scene.events(PATH, *drawn, messages=CHAT, n=2, pieces=(1,))
    assert done is None
    texts = {0: "", 1: ""}
    for chunk in chunks:
        for choice in chunk["choices"]:
            texts[choice["index"]] += choice["delta"].get("content", "")
    assert texts == {0: "One", 1: "Two"}


async def test_a_stream_that_fails_ends_with_an_error_and_without_done(scene: Scene) -> None:
    asking = scene.begin(PATH, messages=CHAT, stream=True)
    entry, _ = await scene.take()
    await scene.settle(entry, Outcome.failed(RuntimeError("a kernel failed"), is_tainted=False))
    events = (await asking).text.split("\n\n")
    assert json.loads(events[-2][6:])["error"]["type"] == "server_error"
    assert "[DONE]" not in events[-1] + events[-2]
    assert "a kernel failed" not in "".join(events)


# --- tools


async def test_tools_are_told_where_the_template_takes_none(scene: Scene) -> None:
    sample = await scene.asked(PATH, messages=CHAT, tools=[WEATHER])
    text = prompt_text(scene, sample.prompt.tokens)
    assert json.dumps(WEATHER) in text
    assert text.startswith("<|im_start|>system\n")
    without = await scene.asked(PATH, messages=CHAT, tools=[WEATHER], tool_choice="none")
    assert "weather" not in prompt_text(scene, without.prompt.tokens)


async def test_former_calls_and_their_results_are_rendered(scene: Scene) -> None:
    call = {"id": "call_1", "type": "function", "function": {"name": "weather", "arguments": '{"town": "Zürich"}'}}
    messages = [
        *CHAT,
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "call_1", "content": "rain"},
    ]
    text = prompt_text(scene, (await scene.asked(PATH, messages=messages, tools=[WEATHER])).prompt.tokens)
    assert f"<|im_start|>assistant\n{CALL}{END}" in text
    assert "<tool_response>\nrain\n</tool_response>" in text


async def test_calls_are_told_as_calls(scene: Scene) -> None:
    answer = await scene.answer(PATH, scene.drawn(f"Let me see.\n{CALL}{END}"), messages=CHAT, tools=[WEATHER])
    (choice,) = answer["choices"]
    (call,) = choice["message"]["tool_calls"]
    assert (call["type"], call["function"]["name"], call["id"][:5]) == ("function", "weather", "call_")
    assert json.loads(call["function"]["arguments"]) == {"town": "Zürich"}
    assert (choice["message"]["content"], choice["finish_reason"]) == ("Let me see.\n", "tool_calls")


async def test_a_call_alone_has_no_content(scene: Scene) -> None:
    answer = await scene.answer(PATH, scene.drawn(f"{CALL}\n{CALL}{END}"), messages=CHAT, tools=[WEATHER])
    message = answer["choices"][0]["message"]
    assert (message["content"], len(message["tool_calls"])) == (None, 2)
    assert message["tool_calls"][0]["id"] != message["tool_calls"][1]["id"]


@pytest.mark.parametrize("text", ['<tool_call>{"name": "weather"', "<tool_call>nothing</tool_call>", "a < b <tool"])
async def test_what_only_looks_like_a_call_is_content(scene: Scene, text: str) -> None:
    answer = await scene.answer(PATH, scene.drawn(text), messages=CHAT, tools=[WEATHER])
    assert answer["choices"][0]["message"] == {"role": "assistant", "content": text, "refusal": None}
    assert answer["choices"][0]["finish_reason"] == "stop"


async def test_without_tools_nothing_is_a_call(scene: Scene) -> None:
    answer = await scene.answer(PATH, scene.drawn(CALL), messages=CHAT, tools=[WEATHER], tool_choice="none")
    assert answer["choices"][0]["message"]["content"] == CALL


async def test_a_stream_holds_a_call_back_and_tells_it_whole(scene: Scene) -> None:
    drawn = scene.drawn(f"See: {CALL}{END}")
    *chunks, done = await scene.events(PATH, drawn, pieces=(1,) * (len(drawn.tokens) - 3), messages=CHAT, tools=[WEATHER])
    assert done is None
    deltas = [chunk["choices"][0]["delta"] for chunk in chunks]
    assert "".join(delta.get("content", "") for delta in deltas) == "See: "
    (calls,) = [delta["tool_calls"] for delta in deltas if "tool_calls" in delta]
    assert (calls[0]["index"], calls[0]["function"]["name"]) == (0, "weather")
    assert [chunk["choices"][0]["finish_reason"] for chunk in chunks][-1] == "tool_calls"


# --- refusals


@pytest.mark.parametrize("arguments", ["", "5", "{", '{"a": NaN}', '{"a": "\\ud800"}', "[" * 100_000])
async def test_arguments_that_are_no_object_are_refused(scene: Scene, arguments: str) -> None:
    call = {"id": "call_1", "type": "function", "function": {"name": "weather", "arguments": arguments}}
    response = await scene.post(PATH, messages=[*CHAT, {"role": "assistant", "tool_calls": [call]}])
    assert (response.status_code, response.json()["error"]["param"]) == (400, "messages[1].tool_calls[0].function.arguments")


@pytest.mark.parametrize(
    ("changes", "param"),
    [
        ({"messages": []}, "messages"),
        ({"messages": [{"role": "king", "content": "a"}]}, "messages.0.role"),
        ({"messages": [{"role": "user"}]}, "messages[0].content"),
        ({"messages": [{"role": "user", "content": 5}]}, "messages.0.content"),
        ({"messages": [{"role": "user", "content": "a", "colour": 1}]}, "messages.0.colour"),
        ({"messages": [{"role": "user", "content": END}]}, "messages[0]"),
        ({"messages": [{"role": "user", "content": [{"type": "text"}]}]}, "messages[0].content[0].text"),
        ({"top_logprobs": 2}, "top_logprobs"),
        ({"logprobs": True, "top_logprobs": 21}, "top_logprobs"),
        ({"max_tokens": 3, "max_completion_tokens": 4}, "max_tokens"),
        ({"tools": [{"type": "function", "function": {"name": "no name"}}]}, "tools.0.function.name"),
        ({"tools": [WEATHER | {"function": {"name": "w", "description": END}}]}, "tools[0]"),
        ({"prompt": "a"}, "prompt"),
    ],
)
async def test_a_refused_request_names_its_field_and_leaves_nothing(scene: Scene, changes: dict[str, object], param: str) -> None:
    kept = scene.face.num_kept()
    response = await scene.post(PATH, **({"messages": CHAT} | changes))
    error = response.json()["error"]
    assert (response.status_code, error["type"], error["param"]) == (400, "invalid_request_error", param), error
    assert scene.face.num_kept() == kept


@pytest.mark.parametrize(
    ("changes", "param"),
    [
        ({"response_format": {"type": "json_object"}}, "response_format"),
        ({"audio": {"voice": "a"}}, "audio"),
        ({"modalities": ["text", "audio"]}, "modalities"),
        ({"functions": [{"name": "a"}]}, "functions"),
        ({"function_call": "auto"}, "function_call"),
        ({"parallel_tool_calls": False}, "parallel_tool_calls"),
        ({"prediction": {"type": "content", "content": "a"}}, "prediction"),
        ({"reasoning_effort": "high"}, "reasoning_effort"),
        ({"service_tier": "flex"}, "service_tier"),
        ({"store": True}, "store"),
        ({"metadata": {"a": "b"}}, "metadata"),
        ({"verbosity": "low"}, "verbosity"),
        ({"web_search_options": {}}, "web_search_options"),
        ({"tools": [WEATHER], "tool_choice": "required"}, "tool_choice"),
        ({"tools": [WEATHER], "tool_choice": {"type": "function", "function": {"name": "weather"}}}, "tool_choice"),
        ({"tools": [{"type": "function", "function": {"name": "w", "strict": True}}]}, "tools[0].function.strict"),
    ],
)
async def test_a_documented_option_that_is_not_served_is_refused_by_name(scene: Scene, changes: dict[str, object], param: str) -> None:
    response = await scene.post(PATH, messages=CHAT, **changes)
    error = response.json()["error"]
    assert (response.status_code, error["code"], error["param"]) == (400, "unsupported_parameter", param)


@pytest.mark.parametrize("kind", ["image_url", "input_audio", "file"])
async def test_parts_that_no_processor_reads_are_never_dropped(scene: Scene, kind: str) -> None:
    parts = [{"type": "text", "text": "What is this?"}, {"type": kind, kind: {"url": "data:image/png;base64,AA=="}}]
    response = await scene.post(PATH, messages=[{"role": "user", "content": parts}])
    error = response.json()["error"]
    assert (response.status_code, error["param"]) == (400, "messages[0].content[1]")
    assert "no processor" in error["message"]


async def test_a_conversation_beyond_the_context_is_told_so(scene: Scene) -> None:
    response = await scene.post(PATH, messages=[{"role": "user", "content": "a b " * 5000}])
    assert (response.status_code, response.json()["error"]["code"]) == (400, "context_length_exceeded")
    assert response.json()["error"]["param"] == "messages"
