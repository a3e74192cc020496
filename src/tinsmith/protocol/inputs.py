"""What a model is fed: chunks of token ids (and, where the base model has a processor, images) and the inputs of a loss."""

from dataclasses import dataclass

from tinsmith.protocol.tensors import Tensor, int32_values


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
