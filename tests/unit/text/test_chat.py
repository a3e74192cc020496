"""Chat templates: the model's own, in a sandbox."""

import json
from pathlib import Path

import pytest

from tinsmith.protocol.errors import ValidationFailed
from tinsmith.protocol.sessions import BaseModelInfo
from tinsmith.text.chat import ChatTemplate

HELLO = [{"role": "user", "content": "Hi <b>"}]


def test_the_template_of_a_model(tiny_model: BaseModelInfo) -> None:
    template = ChatTemplate.from_dir(tiny_model.path)
    assert template is not None
    text = template.render(HELLO)
    assert text.endswith("<|im_start|>user\nHi <b><|im_end|>\n<|im_start|>assistant\n")
    assert template.render(HELLO, add_generation_prompt=False).endswith("<|im_end|>\n")


def test_a_template_in_the_tokenizer_config_with_its_special_tokens(tmp_path: Path) -> None:
    config = {
        "chat_template": "{{ bos_token }}{{ messages[0].content }}{{ eos_token }}",
        "bos_token": "<s>",
        "eos_token": {"content": "</s>"},
    }
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    template = ChatTemplate.from_dir(tmp_path)
    assert template is not None
    assert template.render(HELLO) == "<s>Hi <b></s>"


def test_no_template(tmp_path: Path) -> None:
    assert ChatTemplate.from_dir(tmp_path) is None


def test_tools_are_json_for_a_model_and_not_for_html() -> None:
    template = ChatTemplate("{% for tool in tools %}{{ tool | tojson }}{% if loop.first %}{% continue %}{% endif %}{% endfor %}", {})
    assert template.render(HELLO, tools=[{"name": "größe<1>"}]) == '{"name": "größe<1>"}'


def test_a_refusal_of_the_template_reaches_the_caller() -> None:
    template = ChatTemplate("{{ raise_exception('roles must alternate') }}", {})
    with pytest.raises(ValidationFailed, match="roles must alternate"):
        template.render(HELLO)


@pytest.mark.parametrize(
    "source",
    [
        "{{ ''.__class__.__mro__ }}",
        "{{ messages.append(1) }}",
        "{{ messages[0].content.format.__globals__.os }}",
        "{{ cycler.__init__.__globals__.os }}",
    ],
)
def test_the_sandbox_holds(source: str) -> None:
    messages = [dict(message) for message in HELLO]
    with pytest.raises(ValidationFailed):
        ChatTemplate(source, {}).render(messages)
    assert messages == HELLO


def test_messages_that_the_template_cannot_digest() -> None:
    with pytest.raises(ValidationFailed, match="messages"):
        ChatTemplate("{{ messages[0].content + 1 }}", {}).render(HELLO)


def test_a_broken_template_is_no_template() -> None:
    with pytest.raises(ValueError, match="not a chat template"):
        ChatTemplate("{% for %}", {})
