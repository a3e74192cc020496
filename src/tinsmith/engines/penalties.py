"""What a request changes of the logits before anything is drawn: biases of tokens, and penalties on those already sampled.

Plain numbers: knows nothing of tensors. The definition is that of OpenAI's API (guide "Advanced usage", frequency and presence
penalties), over sampled tokens alone:

    logit[v] <- logit[v] + bias[v] - count[v] * frequency_penalty - (count[v] > 0) * presence_penalty
"""

from collections.abc import Mapping

from tinsmith.protocol.sampling import SamplingParams


def adjustments(params: SamplingParams, counts: Mapping[int, int]) -> dict[int, float]:
    """What is added to the logit of each token that is touched at all. `counts`: how often the sequence holds each token."""
    added = dict(params.logit_bias)
    if params.frequency_penalty != 0 or params.presence_penalty != 0:
        for token, count in counts.items():
            added[token] = added.get(token, 0.0) - count * params.frequency_penalty - params.presence_penalty
    return added
