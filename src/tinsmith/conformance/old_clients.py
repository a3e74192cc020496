"""Items 24, 25 and 27: bodies that no client should send, what older releases send and expect, and telemetry."""

import io
import json
import tarfile
import time
import uuid

import httpx

from tinsmith.conformance import data
from tinsmith.conformance.items import Item, NotRun, Target, expect, expect_equal, item
from tinsmith.conformance.raw import JSON, PROTOBUF, Json, Wire, chunks, passed

ARCHIVE_TRIES = 5  # as many as clients wait out a 503, half a minute each
ARCHIVE_PAUSE_S = 5.0
GZIP = "application/gzip"
MARK = "tml-conformance-mark-that-no-log-may-hold"

POSTS = (
    "client/config",
    "create_session",
    "session_heartbeat",
    "create_model",
    "get_info",
    "forward",
    "forward_backward",
    "optim_step",
    "save_weights",
    "load_weights",
    "save_weights_for_sampler",
    "create_sampling_session",
    "asample",
    "retrieve_future",
    "weights_info",
)
# Empty, cut off, no object, an object of wrong types, and deep.
BROKEN = (
    b"",
    b'{"session_id": "x',
    b"[1]",
    b'{"session_id": 7, "model_id": [], "request_id": {}, "seq_id": "one"}',
    b"[" * 500 + b"]" * 500,
)


@item("24a", "broken bodies are refused with words: no 5xx, no 400 with an empty body")
def broken_bodies(target: Target) -> None:
    with Wire(target) as wire:
        for path in POSTS:
            for content in BROKEN:
                for kind in (JSON, PROTOBUF):
                    response = wire.send("POST", path, content, {"content-type": kind})
                    sent = f"{path} with {content[:20]!r} as {kind}"
                    expect(response.status_code < 500, f"{sent}: {response.status_code}: {response.text[:100]}")
                    expect(response.status_code != 400 or response.content, f"{sent}: 400 with an empty body")


@item("24b", "every metric of a pass has exactly one colon")
def metric_names(target: Target) -> None:
    with Wire(target) as wire:
        metrics = _pass(wire, target, wire.model(wire.session()), "forward_backward", 1)["metrics"]
        expect("loss:sum" in metrics, f"metrics: expected loss:sum among {sorted(metrics)}")
        expect_equal([name for name in metrics if name.count(":") != 1], [], "metrics without exactly one colon")


@item("25a", "clients of 0.7 and 0.16: JSON passes without chunk types, nulls, defaults of the server, no path of an unnamed save")
def json_clients(target: Target) -> None:
    with Wire(target) as wire:
        session_id = wire.session()
        model_id = wire.model(session_id)
        forward = _pass(wire, target, model_id, "forward", 1)
        both = _pass(wire, target, model_id, "forward_backward", 2)
        expect_equal(forward["loss_fn_outputs"], both["loss_fn_outputs"], "loss_fn_outputs of forward and forward_backward")
        step = wire.done(wire.ok("optim_step", {"adam_params": {"learning_rate": 1e-3}, "model_id": model_id, "seq_id": 3})["request_id"])
        expect("metrics" in step.json() or "error" not in step.json(), f"optim_step: {step.text[:200]}")
        asked = {"model_id": model_id, "path": None, "sampling_session_seq_id": 0, "seq_id": 4, "ttl_seconds": None}
        saved = wire.done(wire.ok("save_weights_for_sampler", asked)["request_id"]).json()
        expect_equal(saved.get("path"), None, "path of a save without a name")
        sampler_id = str(saved.get("sampling_session_id"))
        drawn = _sample(wire, target, sampler_id, 0, JSON)
        expect(drawn.headers["content-type"].startswith(JSON), f"content-type of a sample as JSON: {drawn.headers['content-type']}")
        [sequence] = drawn.json()["sequences"]
        expect_equal(len(sequence["logprobs"]), len(sequence["tokens"]), "logprobs a token")
        expect(sequence["stop_reason"] in ("stop", "length"), f"stop_reason: {sequence['stop_reason']!r}")


@item("25b", "clients of 0.22, which read JSON and protobuf, and of 0.25, which read protobuf alone")
def accepts(target: Target) -> None:
    with Wire(target) as wire:
        session_id = wire.session()
        model_id = wire.model(session_id)
        made = wire.ok(
            "create_sampling_session",
            {"session_id": session_id, "sampling_session_seq_id": 0, "base_model": target.model, "model_path": None},
        )
        for seq_id, accept in enumerate((f"{PROTOBUF}, {JSON}", PROTOBUF)):
            asked = passed("forward_backward_input", data.tokens(9, target.vocab_size), model_id, seq_id + 1)
            told = wire.done(wire.ok("forward_backward", asked)["request_id"], accept)
            _expect_type(told, accept, "a pass")
            _expect_type(_sample(wire, target, made["sampling_session_id"], seq_id, accept), accept, "a sample")
        step = wire.ok("optim_step", {"adam_params": {}, "model_id": model_id, "seq_id": 3})["request_id"]
        _expect_type(wire.done(step), JSON, "a step")


@item("25c", "the archive of a sampler checkpoint: 302 to what reads gzip, 302 or JSON to what reads JSON; a tar behind both")
def archives(target: Target) -> None:
    with Wire(target) as wire:
        model_id = wire.model(wire.session())
        asked = {"model_id": model_id, "path": f"archived-{uuid.uuid4().hex[:8]}", "seq_id": 1}
        path = wire.done(wire.ok("save_weights_for_sampler", asked)["request_id"]).json()["path"]
        route = f"training_runs/{model_id}/checkpoints/{'/'.join(path.split('/')[-2:])}/archive"
        redirect = _archive(wire, route, GZIP)
        expect_equal(redirect.status_code, 302, "status of the archive as gzip")
        links = [redirect.headers["location"]]
        plain = _archive(wire, route, JSON)
        expect(plain.status_code in (200, 302), f"status of the archive as JSON: {plain.status_code}")
        if plain.status_code == 200:
            expect("expires" in plain.json(), "the archive as JSON has no expires")
        links.append(plain.json()["url"] if plain.status_code == 200 else plain.headers["location"])
        for link in links:
            held = httpx.get(str(httpx.URL(target.base_url).join(link)), timeout=60.0)  # without the key
            expect_equal(held.status_code, 200, "status of the link, asked without a key")
            with tarfile.open(fileobj=io.BytesIO(held.content)) as archive:
                names = [name.removeprefix("./") for name in archive.getnames()]
            expect("checkpoint_complete" in names, f"files of the archive: {names}")
            expect(any("adapter" in name for name in names), f"files of the archive: {names}")


@item("25d", "checkpoints of a kind that an old client does not know are not shown to it")
def external_checkpoints(target: Target) -> None:
    with Wire(target) as wire:
        model_id = wire.model(wire.session())
        asked = {"model_id": model_id, "path": "for-others", "seq_id": 1}
        wire.done(wire.ok("save_weights_external", asked)["request_id"])
        for agent, wanted in (("AsyncTinker/Python 0.16.1", []), ("AsyncTinker/Python 0.38.0", ["external"])):
            listed = wire.get(f"training_runs/{model_id}/checkpoints", {"user-agent": agent}).json()["checkpoints"]
            expect_equal([checkpoint["checkpoint_type"] for checkpoint in listed], wanted, f"kinds that {agent} is shown")


@item("27a", "telemetry is taken")
def telemetry(target: Target) -> None:
    with Wire(target) as wire:
        expect_equal(wire.ok("telemetry", _events()).get("status"), "accepted", "status in the answer")


@item("27b", "what telemetry tells of a key is in no log")
def telemetry_logs(target: Target) -> None:
    if target.server is None:
        raise NotRun("needs the server's log; start it with --local")
    with Wire(target) as wire:
        wire.ok("telemetry", _events())
    expect(MARK not in target.server.log, "the server's log holds a key that was in telemetry")


def _events() -> Json:
    event = {
        "event": "GENERIC_EVENT",
        "event_id": str(uuid.uuid4()),
        "event_session_index": 0,
        "severity": "ERROR",
        "timestamp": "2026-01-01T00:00:00Z",
        "event_name": "APIFuture.result_async.api_status_error",
        "event_data": {"request_headers": {"x-api-key": MARK}},
    }
    return {"events": [event], "platform": "linux", "sdk_version": "0.38.0", "session_id": f"sessionless-{uuid.uuid4()}"}


def _pass(wire: Wire, target: Target, model_id: str, path: str, seq_id: int) -> Json:
    """The result of a pass as JSON. Raises Mismatch where it is not what the first releases read."""
    asked = passed(f"{path}_input", data.tokens(9, target.vocab_size), model_id, seq_id)
    told = wire.done(wire.ok(path, asked)["request_id"])
    _expect_type(told, JSON, path)
    result: Json = told.json()
    missing = {"loss_fn_output_type", "loss_fn_outputs", "metrics"} - set(result)
    expect(not missing, f"{path} as JSON lacks {sorted(missing)}: {json.dumps(result)[:200]}")
    [output] = result["loss_fn_outputs"]
    expect_equal((output["logprobs"]["dtype"], output["logprobs"]["shape"]), ("float32", [8]), "dtype and shape of logprobs")
    expect_equal(set(output["logprobs"]), {"data", "dtype", "shape"}, "keys of a tensor, of which the first releases take no other")
    return result


def _sample(wire: Wire, target: Target, sampler_id: str, seq_id: int, accept: str) -> httpx.Response:
    asked = {
        "num_samples": 1,
        "prompt": chunks(data.tokens(8, target.vocab_size)),
        "sampling_params": {"max_tokens": 3, "seed": 5, "stop": None},
        "sampling_session_id": sampler_id,
        "seq_id": seq_id,
    }
    promise = wire.ok("asample", asked)
    expect_equal(len(promise.get("sample_sequence_ids") or ()), 1, "number of sample_sequence_ids")
    return wire.done(promise["request_id"], accept)


def _expect_type(told: httpx.Response, accept: str, what: str) -> None:
    expect_equal(told.status_code, 200, f"status of {what}")
    kind = told.headers.get("content-type", "").partition(";")[0]
    expect(kind in accept.split(", "), f"content-type of {what} for Accept {accept}: {kind} ({told.text[:100] if kind == JSON else ''})")


def _archive(wire: Wire, route: str, accept: str) -> httpx.Response:
    """Waits while it is being made."""
    for _ in range(ARCHIVE_TRIES):
        response = wire.get(route, {"accept": accept})
        if response.status_code != 503:
            break
        time.sleep(ARCHIVE_PAUSE_S)
    return response


ITEMS: tuple[Item, ...] = (broken_bodies, metric_names, json_clients, accepts, archives, external_checkpoints, telemetry, telemetry_logs)
