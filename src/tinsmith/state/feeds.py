"""Completion feeds: which samples of one client of a sampling session have ended, in the order of their ends.

A feed is an index that the lanes write in the step that ends a sample, whatever ends it, so none can be missed. It holds numbers and
request ids only; whether a sample is finished or failed is read from its record. A number is that of the feed's event on the topic
`settled`, so numbers grow for as long as the store lives, whatever becomes of the feed. An event goes when a cursor has passed it, when
its result is acknowledged, or with the record of its request.

The names are the Tinker wire's: clients count their requests within blocks, one block a client. Knows nothing of HTTP or of a store.
"""

from dataclasses import dataclass

CLIENT_SPAN = 1_000_000_000  # seq ids of one client of a sampling session; the first client's begin at 0


@dataclass(frozen=True, slots=True)
class Completion:
    """A sample that has ended. `result_size` in bytes as it is stored; None where there is no result, or none any more."""

    rid: str
    result_size: int | None


@dataclass(frozen=True, slots=True)
class FeedPage:
    """What ended after a cursor, oldest first, and the cursor after it: that which was asked for where nothing did."""

    completions: tuple[Completion, ...]
    cursor: int


def feed_name(sampler_id: str, client: int) -> str:
    """The feed of one client of a sampling session, and what the event says that tells of it; no request id looks so."""
    return f"{sampler_id}/{client}"


def feed_of(sampler_id: str, seq_id: int) -> str:
    """The feed in which the end of that sample is told."""
    return feed_name(sampler_id, seq_id // CLIENT_SPAN)
