"""Items 19 and 20: a client that is killed, and a server that is started anew. Both need a server that the run started."""

import subprocess
import sys
import time

from tinsmith.conformance import data
from tinsmith.conformance.items import Item, Mismatch, NotRun, Target, expect, expect_equal, item
from tinsmith.conformance.local import LocalServer
from tinsmith.conformance.raw import Wire, chunks, passed

SWEEP_S = 60.0  # within which a server finds that a session is silent for too long
CLIENT_S = 120.0
PAUSE_S = 1.0
CLIENT = """
import sys, time, tinker
url, key, model = sys.argv[1:]
service = tinker.ServiceClient(base_url=url, api_key=key)
made = service.create_lora_training_client(model, rank=8)
trainer = made.result() if hasattr(made, "result") else made
print(trainer.get_info().model_id, flush=True)
time.sleep(3600)
"""


@item("19", "a client that is killed: its session ends, its work is dropped, and nothing that asks for it hangs")
def killed_clients(target: Target) -> None:
    timeout_s = target.session_timeout_s
    if target.server is None or timeout_s is None:
        raise NotRun("needs a server whose sessions end soon; start it with --local")
    words = [sys.executable, "-c", CLIENT, target.base_url, target.api_key, target.model]
    client = subprocess.Popen(words, stdout=subprocess.PIPE, text=True)  # noqa: S603 (words of this module)
    try:
        model_id = "" if client.stdout is None else client.stdout.readline().strip()
    finally:
        client.kill()
        client.communicate(timeout=CLIENT_S)
    expect(":train:" in model_id, f"the client told no model_id: {model_id!r}")
    ids = data.tokens(9, target.vocab_size)
    with Wire(target) as wire:
        # Waits for number 1, which never comes.
        pending = wire.ok("forward", passed("forward_input", ids, model_id, 2))["request_id"]
        _await_end(wire, model_id.partition(":")[0], timeout_s + SWEEP_S)
        dropped = wire.done(pending)
        expect(dropped.status_code in (404, 410) or "error" in dropped.json(), f"queued work after the end: {dropped.text[:200]}")
        later = wire.post("forward", passed("forward_input", ids, model_id, 3))
        expect(400 <= later.status_code < 500, f"status of work after the end: {later.status_code}")
        again = wire.post("create_sampling_session", {"session_id": model_id.partition(":")[0], "sampling_session_seq_id": 0})
        expect(400 <= again.status_code < 500, f"status of a sampler after the end: {again.status_code}")


@item("20", "a restart while polls are open: samples are to be sent again, steps have failed; or a durable store, and both go on")
def restarts(target: Target) -> None:
    server = target.server
    if server is None:
        raise NotRun("needs the server's process; start it with --local")
    ids = data.tokens(9, target.vocab_size)
    with Wire(target) as wire:
        session_id = wire.session()
        model_id = wire.model(session_id)
        sampler_id = wire.ok(
            "create_sampling_session", {"session_id": session_id, "sampling_session_seq_id": 0, "base_model": target.model}
        )["sampling_session_id"]
        step = wire.ok("forward", passed("forward_input", ids, model_id, 2))["request_id"]
        asked = {
            "num_samples": 1,
            "prompt": chunks(ids),
            "sampling_params": {"max_tokens": 64},
            "sampling_session_id": sampler_id,
            "seq_id": 0,
        }
        sample = wire.ok("asample", asked)["request_id"]
    _restart(server, target)
    with Wire(target) as wire:
        sampled = wire.done(sample)
        is_durable = sampled.status_code == 200
        if is_durable:
            expect("error" not in sampled.json(), f"the sample after the restart: {sampled.text[:200]}")
            wire.ok("forward", passed("forward_input", ids, model_id, 1))
            expect("error" not in wire.done(step).json(), "a pass after the restart failed")
        else:
            expect_equal(sampled.status_code, 410, "status of a sample that was pending")
            passed_on = wire.done(step)
            told = passed_on.json()
            expect_equal((passed_on.status_code, told.get("category")), (200, "server"), "status and category of a pass that was pending")
        target_of = {"type": "sampling_session", "sampling_session_id": sampler_id, "cloned_sampler_id": 0}
        poll = wire.post("retrieve_futures", {"target": target_of, "prev_cursor": 1_000, "timeout": 0, "retrieved_request_ids": []})
        expect(poll.status_code < 500, f"status of the session poller with a cursor of before: {poll.status_code}")
        expect(not is_durable or poll.status_code == 200, f"status of the session poller on a durable store: {poll.status_code}")
        wire.model(wire.session())


def _restart(server: LocalServer, target: Target) -> None:
    server.restart()
    expect_equal(server.url, target.base_url, "address after the restart")


def _await_end(wire: Wire, session_id: str, within_s: float) -> None:
    """Until the session is over. A heartbeat would keep it alive; a search does not."""
    deadline = time.monotonic() + within_s
    asked = {"session_id": session_id, "user_metadata": {}, "owner": {"type": "own"}, "limit": 1}
    while time.monotonic() < deadline:
        [found] = wire.ok("sessions/search", asked)["sessions"]
        if (found.get("status") or {}).get("type") != "active":
            return
        time.sleep(PAUSE_S)
    raise Mismatch(f"the session was not over {within_s:.0f} s after its client was killed")


ITEMS: tuple[Item, ...] = (killed_clients, restarts)
