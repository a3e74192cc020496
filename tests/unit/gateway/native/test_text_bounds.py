"""Text that would take long to render is refused before it is, and text that waits holds up nothing else."""

import time
from collections.abc import AsyncIterator

import pytest

from tests.fakes.face import Face, open_face
from tests.unit.gateway.native.bodies import body_of, furnished, tiny
from tinsmith.protocol.native import MAX_CHARACTERS, MAX_MESSAGES, MAX_RENDERED, MAX_TURNS
from tinsmith.protocol.sessions import BaseModelInfo
from tinsmith.protocol.wire_bounds import check_command_size
from tinsmith.text.conversations import Conversations, rendered_characters

SOON_S = 10.0  # what is refused took minutes to render
SYSTEM, USER, ASSISTANT = ({"role": role, "content": ""} for role in ("system", "user", "assistant"))
TURNS = {"messages": [SYSTEM, *[ASSISTANT] * 338]}  # fits into the context, and takes a rendering of each beginning


@pytest.fixture
async def worded(tiny_model: BaseModelInfo) -> AsyncIterator[Face]:
    """A face whose base model has a tokenizer and a chat template."""
    async with open_face(base=tiny(tiny_model)) as opened:
        yield opened


@pytest.fixture
def unread(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is rendered or tokenized."""

    def fail(*_: object) -> None:
        raise AssertionError("what is over a bound is not looked at")

    for name in ("supervise", "prompt", "encode"):
        monkeypatch.setattr(Conversations, name, fail)


@pytest.mark.proves("R45")
@pytest.mark.usefixtures("unread")
@pytest.mark.parametrize(
    ("changes", "status", "told"),
    [
        ({"conversations": [TURNS] * 45}, 413, "conversations: rendering each assistant's turn"),
        ({"conversations": [{"messages": [USER] * MAX_TURNS}] * 17}, 413, f"conversations: more than {MAX_MESSAGES} messages"),
        ({"conversations": [{"messages": [USER | {"content": "a" * 100_000}]}] * 42}, 413, "conversations: 4200000 characters"),
        (
            {"conversations": [{"messages": [USER | {"content": "a" * 200_000}]}]},
            422,
            "conversations[0]: 200000 characters, a context of 2048",
        ),
        ({"texts": ["a" * 16_000_000]}, 413, f"texts: 16000000 characters, the bound is {MAX_CHARACTERS}"),
        ({"texts": ["a b", "a" * 200_000]}, 422, "texts[1]: 200000 characters, a context of 2048"),
    ],
)
async def test_text_that_would_take_minutes_is_refused_before_it_is_rendered(worded: Face, changes, status, told):
    names = await furnished(worded)
    kept = worded.num_kept()
    began = time.monotonic()
    answer = await worded.native("/evaluate", body_of("/evaluate", names, batch=None, **changes))
    assert (answer.status_code, answer.json()["error"][: len(told)]) == (status, told), answer.text
    assert time.monotonic() - began < SOON_S
    assert worded.num_kept() == kept


@pytest.mark.proves("R45")
@pytest.mark.usefixtures("unread")
@pytest.mark.parametrize("path", ["/sample", "/sample_stream"])
@pytest.mark.parametrize(
    ("changes", "status", "told"),
    [
        ({"text": "a" * 16_000_000}, 413, f"text: 16000000 characters, the bound is {MAX_CHARACTERS}"),
        ({"text": "a" * 200_000}, 422, "text: 200000 characters, a context of 2048"),
        ({"messages": [USER | {"content": "a" * 5_000_000}]}, 413, "messages: 5000000 characters"),
        ({"messages": [USER | {"content": "a" * 200_000}]}, 422, "messages: 200000 characters, a context of 2048"),
        ({"messages": [ASSISTANT] * MAX_TURNS}, 413, "messages: rendering each assistant's turn"),
    ],
)
async def test_a_prompt_that_no_context_holds_is_refused_before_it_is_tokenized(worded: Face, path, changes, status, told):
    names = await furnished(worded)
    answer = await worded.native(path, body_of(path, names, prompt_ids=None, **changes))
    assert (answer.status_code, answer.json()["error"][: len(told)]) == (status, told), answer.text


async def test_a_long_chat_by_turns_is_rendered_and_so_are_many_short_ones(worded: Face):
    names = await furnished(worded)
    spoken = [USER | {"content": "Name one."}, ASSISTANT | {"content": "Blue."}]
    for seq_id, chats in enumerate(([spoken * 60], [spoken] * 1000), start=1):
        conversations = [{"messages": chat} for chat in chats]
        await worded.native_ok("/forward", body_of("/forward", names, seq_id=seq_id, batch=None, conversations=conversations))
    assert rendered_characters([("user", 500), ("assistant", 500)] * (MAX_TURNS // 2)) < MAX_RENDERED


async def test_rendering_stops_at_the_first_text_that_does_not_fit(worded: Face, monkeypatch: pytest.MonkeyPatch):
    names = await furnished(worded)
    read: list[str] = []
    encode = Conversations.encode

    def noted(texts: Conversations, text: str) -> list[int]:
        read.append(text)
        return encode(texts, text)

    monkeypatch.setattr(Conversations, "encode", noted)
    too_long = "a b " * 1100
    answer = await worded.native("/forward", body_of("/forward", names, batch=None, texts=["a b", too_long, "c d"]))
    assert (answer.status_code, answer.json()["error"]) == (422, "texts[1]: 2200 tokens exceed the context of 2048; shorten it")
    assert read == ["a b", too_long]


async def test_rendering_stops_at_the_bytes_of_a_command(worded: Face, monkeypatch: pytest.MonkeyPatch):
    names = await furnished(worded)
    sizes: list[int] = []

    def bounded(size: int) -> None:
        sizes.append(size)
        check_command_size(size if len(sizes) < 3 else 2**30)

    monkeypatch.setattr("tinsmith.gateway.native.commands.check_command_size", bounded)
    answer = await worded.native("/forward", body_of("/forward", names, batch=None, texts=["a b"] * 9))
    assert (answer.status_code, answer.json()["reason"], len(sizes)) == (413, "payload_too_large", 3)


@pytest.mark.parametrize("route", ["/forward", "/sample"])
async def test_a_chat_with_a_control_token_is_refused_by_its_name_and_a_text_with_one_is_not(worded: Face, route):
    names = await furnished(worded)
    messages = [USER | {"content": "Hi"}, ASSISTANT | {"content": "so<|im_end|>"}]
    chat = {"conversations": [{"messages": messages}], "batch": None} if route == "/forward" else {"messages": messages, "prompt_ids": None}
    refused = await worded.native(route, body_of(route, names, **chat))
    assert (refused.status_code, "messages[1]: holds '<|im_end|>'" in refused.json()["error"]) == (422, True), refused.text
    plain = {"texts": ["so<|im_end|>"], "batch": None} if route == "/forward" else {"text": "so<|im_end|>", "prompt_ids": None}
    await worded.native_ok(route, body_of(route, names, **plain))
