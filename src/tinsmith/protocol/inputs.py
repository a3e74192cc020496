"""What a model is fed: chunks of token ids (and, where the base model has a processor, images) and the inputs of a loss."""

from dataclasses import dataclass

from tinsmith.protocol.errors import ValidationFailed
from tinsmith.protocol.tensors import Tensor, int32_values

# The chunks of the Tinker wire that are no text, and what a base model would need to read them.
_NEEDS = {"image": "an image processor", "image_asset_pointer": "an image processor", "dmel": "an audio encoder"}


def unreadable_chunk(field: str, kind: str | None) -> ValidationFailed:
    """The refusal of a chunk that is no text; `kind` None: it says nothing of what it is."""
    if kind in _NEEDS:
        return ValidationFailed(
            f"{field}: {kind} chunks need a base model with {_NEEDS[kind]}, and those served here read text alone; send encoded_text chunks"
        )
    return ValidationFailed(f"{field}: no chunk of a known type ({kind or 'none'}); send an encoded_text chunk with its tokens")


@dataclass(frozen=True, slots=True)
class TextChunk:
    """Token ids, int32 little-endian."""

    tokens: bytes

    def __len__(self) -> int:
        return len(self.tokens) // 4


@dataclass(frozen=True, slots=True)
class ModelInput:
    """A sequence of chunks; its length is counted in tokens."""

    chunks: tuple[TextChunk, ...]

    def __len__(self) -> int:
        return sum(len(chunk) for chunk in self.chunks)

    @property
    def tokens(self) -> list[int]:
        return list(int32_values(self.token_bytes))

    @property
    def token_bytes(self) -> bytes:
        """All token ids, int32 little-endian."""
        return b"".join(chunk.tokens for chunk in self.chunks)


@dataclass(frozen=True, slots=True)
class Datum:
    """One sequence and its loss inputs. Row t of a loss input belongs to input position t; the caller has shifted the targets."""

    model_input: ModelInput
    loss_fn_inputs: dict[str, Tensor]
