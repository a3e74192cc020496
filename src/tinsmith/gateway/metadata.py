"""Free text that callers attach to sessions, models and checkpoints: bounded, since it is stored."""

import json
from collections.abc import Mapping
from typing import TypeVar

from tinsmith.protocol.errors import ValidationFailed
from tinsmith.protocol.sessions import MAX_TEXT

MAX_METADATA = 16 * 1024  # characters of metadata, as JSON

AnyText = TypeVar("AnyText", str, str | None)


def checked_text(field: str, text: AnyText) -> AnyText:
    """Raises ValidationFailed for a text that is too long."""
    if text is not None and len(text) > MAX_TEXT:
        raise ValidationFailed(f"{field}: {len(text)} characters, the bound is {MAX_TEXT}; shorten it")
    return text


def checked_metadata(metadata: Mapping[str, object] | None) -> dict[str, str] | None:
    """Values that are no text are kept as their JSON. Raises ValidationFailed for metadata that are too long."""
    if metadata is None:
        return None
    texts = {key: value if isinstance(value, str) else json.dumps(value) for key, value in metadata.items()}
    size = sum(len(key) + len(value) for key, value in texts.items())
    if size > MAX_METADATA:
        raise ValidationFailed(f"user_metadata: {size} characters, the bound is {MAX_METADATA}; store less beside the model")
    return texts
