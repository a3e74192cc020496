"""Tool calls in the text that a model writes."""

import json

import pytest

from tinsmith.text.chat import ChatTemplate
from tinsmith.text.tool_calls import HERMES, LLAMA, MISTRAL, Parsed, ToolCall, ToolFormat, format_of, has_calls, spelled_out

ONE = '{"name": "f", "arguments": {"a": "ü"}}'
F = ToolCall("f", '{"a": "ü"}')
G = ToolCall("g", "{}")


@pytest.mark.parametrize(
    ("form", "text", "content", "calls"),
    [
        (HERMES, f"<tool_call>\n{ONE}\n</tool_call>", "", (F,)),
        (HERMES, f'Yes. <tool_call>{ONE}</tool_call>\n<tool_call>{{"name": "g"}}</tool_call>', "Yes. \n", (F, G)),
        (HERMES, f'<tool_call>[{ONE}, {{"name": "g"}}]</tool_call>', "", (F, G)),
        (HERMES, f"<tool_call>{ONE}", "", (F,)),
        (MISTRAL, f"Yes.[TOOL_CALLS] [{ONE}]", "Yes.", (F,)),
        (LLAMA, '{"name": "f", "parameters": {"a": "ü"}}', "", (F,)),
        (LLAMA, '<|python_tag|>{"name": "g", "parameters": {}}', "", (G,)),
    ],
)
def test_calls(form: ToolFormat, text: str, content: str, calls: tuple[ToolCall, ...]) -> None:
    assert form.parse(text) == Parsed(content, calls)


@pytest.mark.parametrize(
    ("form", "text"),
    [
        (HERMES, "no call"),
        (HERMES, ONE),
        (HERMES, "<tool_call>{broken</tool_call>"),
        (HERMES, f'<tool_call>{ONE}</tool_call><tool_call>{{"arguments": {{}}}}</tool_call>'),
        (HERMES, '<tool_call>{"name": "", "arguments": {}}</tool_call>'),
        (HERMES, '<tool_call>{"name": "f", "arguments": "a"}</tool_call>'),
        (HERMES, '<tool_call>{"name": "f", "arguments": {"a": NaN}}</tool_call>'),
        (HERMES, "<tool_call>" + "[" * 100_000),
        (HERMES, "<tool_call>[]</tool_call>"),
        (LLAMA, ONE + " and more"),
        (LLAMA, "{"),
    ],
)
def test_what_is_no_call_is_content(form: ToolFormat, text: str) -> None:
    assert form.parse(text) == Parsed(text, ())


def test_half_a_character_in_a_call_is_left_as_json_spells_it() -> None:
    (call,) = HERMES.parse('<tool_call>{"name": "f", "arguments": {"a": "\\ud800"}}</tool_call>').calls
    assert call.arguments == '{"a": "\\ud800"}'
    assert HERMES.parse('<tool_call>{"name": "\\ud800", "arguments": {}}</tool_call>').calls == ()


@pytest.mark.parametrize(
    ("form", "text", "start", "begin"),
    [
        (HERMES, "a < b", 0, 5),
        (HERMES, "a <tool", 0, 2),
        (HERMES, "a <tool_call>b", 0, 2),
        (HERMES, "a <tool_call>b", 2, 2),
        (LLAMA, "", 0, 0),
        (LLAMA, " {", 0, 0),
        (LLAMA, "<|py", 0, 0),
        (LLAMA, "Yes {", 0, 5),
        (LLAMA, "Yes {", 4, 5),
    ],
)
def test_where_a_call_may_begin(form: ToolFormat, text: str, start: int, begin: int) -> None:
    assert form.begin(text, start) == begin


@pytest.mark.parametrize(
    ("source", "form"),
    [
        ("{{ tools }}<tool_call>", HERMES),
        ("{{ tools }}[TOOL_CALLS]", MISTRAL),
        ('{{ tools }}{"name": name, "parameters": {}}', LLAMA),
        ("{{ messages }}", HERMES),
    ],
)
def test_the_form_is_that_of_the_template(source: str, form: ToolFormat) -> None:
    assert format_of(source) is form


@pytest.mark.parametrize(
    ("source", "takes"),
    [
        ("{% if tools %}{{ tools }}{% endif %}", True),
        ("{%- if not tools is defined %}{%- set tools = none %}{%- endif %}{{ messages }}", True),
        ("{{ messages }}", False),
    ],
)
def test_a_template_shows_whether_it_takes_tools(source: str, takes: bool) -> None:
    assert ChatTemplate(source, {}).takes_tools is takes


def test_a_template_that_takes_none_gets_them_in_words() -> None:
    call = {"id": "1", "type": "function", "function": {"name": "f", "arguments": {"a": 1}}}
    messages: list[dict[str, object]] = [
        {"role": "system", "content": "Be brief."},
        {"role": "assistant", "content": "", "tool_calls": [call]},
        {"role": "tool", "content": "5"},
    ]
    assert has_calls(messages)
    assert not has_calls(messages[:1])
    tool = {"type": "function", "function": {"name": "f"}}
    system, asked, answered = spelled_out(messages, [tool])
    assert str(system["content"]).startswith("Be brief.\n\n")
    assert json.dumps(tool) in str(system["content"])
    assert HERMES.parse(str(asked["content"])).calls == (ToolCall("f", '{"a": 1}'),)
    assert answered == {"role": "user", "content": "<tool_response>\n5\n</tool_response>"}
    assert [message["role"] for message in spelled_out(messages[1:], [tool])] == ["system", "assistant", "user"]
    assert spelled_out(messages[:1], []) == messages[:1]
