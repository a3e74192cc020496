"""Chat templates: messages to prompt text, by the template that came with the model, in a sandbox.

A template is a program from the model's author: it sees the messages and a few functions, no attribute that starts with an underscore,
and can change nothing that it is given.
"""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NoReturn

from jinja2 import TemplateError, meta
from jinja2.ext import loopcontrols
from jinja2.sandbox import ImmutableSandboxedEnvironment

from tinsmith.protocol.errors import ValidationFailed

Message = Mapping[str, object]


class ChatTemplate:
    def __init__(self, source: str, special_tokens: Mapping[str, str]) -> None:
        """`special_tokens`: names that templates use, e.g. bos_token. Raises ValueError if the source is no template."""
        environment = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols])
        environment.filters["tojson"] = _to_json
        environment.globals["raise_exception"] = _refuse
        try:
            self._template = environment.from_string(source)
            self.takes_tools = "tools" in meta.find_undeclared_variables(environment.parse(source))
        except TemplateError as error:
            raise ValueError(f"not a chat template: {error}") from error
        self.source = source
        self._special_tokens = dict(special_tokens)

    @classmethod
    def from_dir(cls, path: str | Path) -> "ChatTemplate | None":
        """The template of a model directory: chat_template.jinja, else the one in tokenizer_config.json; None if it has none."""
        directory = Path(path)
        config_file = directory / "tokenizer_config.json"
        config = json.loads(config_file.read_text()) if config_file.is_file() else {}
        own_file = directory / "chat_template.jinja"
        source = own_file.read_text() if own_file.is_file() else config.get("chat_template")
        return cls(source, _special_tokens(config)) if isinstance(source, str) else None

    def render(
        self, messages: Sequence[Message], *, add_generation_prompt: bool = True, tools: Sequence[Mapping[str, object]] | None = None
    ) -> str:
        """The prompt text. Raises ValidationFailed where the template refuses the messages or cannot digest them."""
        try:
            return self._template.render(
                messages=messages, tools=tools, add_generation_prompt=add_generation_prompt, **self._special_tokens
            )
        except (TemplateError, TypeError, ValueError) as error:
            raise ValidationFailed(
                f"messages: the chat template of the base model refuses them ({error}); send others, or token ids"
            ) from error


def _special_tokens(config: Mapping[str, object]) -> dict[str, str]:
    """Entries such as bos_token, as text or as {"content": text}."""
    found: dict[str, str] = {}
    for key, value in config.items():
        content = value.get("content") if isinstance(value, dict) else value
        if key.endswith("_token") and isinstance(content, str):
            found[key] = content
    return found


def _to_json(value: object, indent: int | None = None) -> str:
    """Unlike jinja's own filter this one escapes nothing for HTML: the text goes to a model."""
    return json.dumps(value, ensure_ascii=False, indent=indent)


def _refuse(message: str) -> NoReturn:
    raise TemplateError(message)
