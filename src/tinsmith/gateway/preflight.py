"""What a request is refused for before it is queued: known losses and inputs, lengths, token ids, the context limit.

A function of the command and the facts of its base model. An engine checks again what its numerics depend on; this is so that bad input
costs its caller no turn in a queue.
"""

from tinsmith.protocol import loss_checks, sample_checks
from tinsmith.protocol.loss_checks import TINKER_NAMES, FieldNames, Limits
from tinsmith.protocol.sampling import Sample
from tinsmith.protocol.sessions import BaseModelInfo
from tinsmith.protocol.training import Compute


def check_compute(command: Compute, base: BaseModelInfo, names: FieldNames = TINKER_NAMES) -> None:
    """Raises ValidationFailed, InputTokensExceeded or PayloadTooLarge, naming the field as the face does, and the remedy."""
    loss_checks.check_compute(command, _limits(base), names=names)


def check_sample(sample: Sample, base: BaseModelInfo) -> None:
    """Raises ValidationFailed or InputTokensExceeded, naming the field and the remedy."""
    sample_checks.check_sample(sample, _limits(base))


def _limits(base: BaseModelInfo) -> Limits:
    return Limits(base.vocab_size, base.max_context)
