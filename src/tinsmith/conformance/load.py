"""Item 26: many samples at once, many clones, polls that last, and no descriptor that stays."""

import gc
import pickle  # noqa: TID251 (the SDK supports it; what is read was written a line before)
import time
from pathlib import Path

from tinker import types

from tinsmith.conformance import data
from tinsmith.conformance.items import Item, NotRun, Target, expect, expect_equal, faulty, item, until
from tinsmith.conformance.raw import POLL_S, Wire, passed

NUM_SAMPLES = 2_000
NUM_CLONES = 64
SETTLE_S = 90.0  # within which idle connections are closed by one side or the other
SLACK = 32  # descriptors that a process opens by itself meanwhile


@item("26a", f"{NUM_SAMPLES:,} samples at once from {NUM_CLONES} clones with the session poller; no descriptor stays open")
def crowd(target: Target) -> None:
    before = _num_descriptors(target)
    with faulty(target):
        pass  # for its bound on releases
    service = target.service()
    sampler = target.sampler(service)
    clones = [pickle.loads(pickle.dumps(sampler)) for _ in range(NUM_CLONES)]  # noqa: S301 (of this process)
    prompt, params = data.prompt(data.tokens(8, target.vocab_size)), types.SamplingParams(max_tokens=1)
    futures = [clones[index % NUM_CLONES].sample(prompt, 1, params) for index in range(NUM_SAMPLES)]
    outputs = [future.result(timeout=900.0) for future in futures]
    expect_equal(sum(len(output.sequences) for output in outputs), NUM_SAMPLES, "number of sequences")
    ids = {output.sequences[0].sequence_id for output in outputs}
    expect_equal(len(ids), NUM_SAMPLES, "number of different sequence ids")
    for clone in clones:
        clone.holder.close()
    del sampler, clones, futures, outputs
    target.close_services()
    gc.collect()
    until(lambda: _num_descriptors(target) <= before + SLACK, SETTLE_S, f"{before} open descriptors, as at the start")


@item("26b", f"a poll for what takes long is answered with 408 within {POLL_S:.0f} s")
def long_polls(target: Target) -> None:
    with Wire(target) as wire:
        model_id = wire.model(wire.session())
        # The number before it never comes, so it waits.
        waiting = wire.ok("forward", passed("forward_input", data.tokens(9, target.vocab_size), model_id, 2))["request_id"]
        started = time.monotonic()
        told = wire.poll(waiting)
        took = time.monotonic() - started
        if told.status_code == 200:
            raise NotRun(f"the server waited {took:.0f} s for a number that is missing, less than for the end of its poll")
        expect_equal(told.status_code, 408, "status of a poll for what is pending")
        expect(took < POLL_S, f"the poll took {took:.0f} s")
        expect_equal((told.json().get("type"), told.json().get("request_id")), ("try_again", waiting), "type and request_id of the 408")
        states = ("active", "paused_capacity", "paused_rate_limit")
        expect(told.json().get("queue_state") in states, f"queue_state: {told.json().get('queue_state')!r}")
        wire.ok("forward", passed("forward_input", data.tokens(9, target.vocab_size), model_id, 1))
        expect_equal(wire.done(waiting).status_code, 200, "status when the missing number has come")


def _num_descriptors(target: Target) -> int:
    """Of the server, where the run started it, and else of this process. Raises NotRun where neither can be counted."""
    held = Path("/proc/self/fd")
    if not held.is_dir():
        raise NotRun("needs /proc, to count open descriptors")
    return len(list(held.iterdir())) if target.server is None else target.server.num_descriptors()


ITEMS: tuple[Item, ...] = (crowd, long_polls)
