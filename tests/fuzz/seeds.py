"""A request that is right for each route of the Tinker wire and of the OpenAI face: where the fuzzer starts from.

`<...>` stands for an id of a server that was furnished (`furnished`), `<seq>` for the next number of a lane. The table is closed: a route
of the app that has no seed fails `test_every_route_has_a_seed`.
"""

import http.client
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol
from urllib.parse import parse_qsl, urlsplit

from tinsmith.protocol import tinker_pb2 as pb

PREFIXES = ("/api/v1/", "/v1/")
KEPT, SPARE = "kept", "spare"  # names of checkpoints; the spare ones may be deleted
LINK_PARTS = ("tenant", "expires", "key", "signature")
FILE = "adapter_model.safetensors"

DATUM = {
    "model_input": {"chunks": [{"type": "encoded_text", "tokens": [1, 2]}]},
    "loss_fn_inputs": {
        "target_tokens": {"data": [2, 3], "dtype": "int64", "shape": [2]},
        "weights": {"data": [1.0, 0.5], "dtype": "float32"},
    },
}
SPARSE = {"data": [2, 3], "dtype": "int64", "shape": [2, 4], "sparse_crow_indices": [0, 1, 2], "sparse_col_indices": [0, 3]}
PASS = {"data": [DATUM], "loss_fn": "cross_entropy", "loss_fn_config": {}}
SPARSE_PASS = {"data": [DATUM | {"loss_fn_inputs": {"target_tokens": SPARSE}}], "loss_fn": "cross_entropy"}
TURN = {"model_id": "<run>", "seq_id": "<seq>"}
ADAM = {"learning_rate": 1e-4, "beta1": 0.9, "beta2": 0.95, "eps": 1e-12, "weight_decay": 0.0, "grad_clip_norm": 1.0}
LOGPROBS, TOTAL = {"ref": "logprobs"}, {"ref": "total"}
GRAPH = {
    "format": 1,
    "nodes": [
        {"op": "placeholder", "name": "logprobs", "target": "logprobs", "args": [], "kwargs": {}},
        {"op": "call_function", "name": "half", "target": "operator.mul", "args": [LOGPROBS, 0.5], "kwargs": {}},
        {"op": "call_method", "name": "total", "target": "sum", "args": [{"ref": "half"}], "kwargs": {}},
        {
            "op": "output",
            "name": "output",
            "target": "output",
            "args": [{"tuple": [TOTAL, {"dict": {"custom/x:mean": TOTAL}}]}],
            "kwargs": {},
        },
    ],
}
SAMPLING = {"max_tokens": 4, "seed": 5, "temperature": 1.0, "top_k": -1, "top_p": 0.9, "stop": ["a"]}
SAMPLE = {
    "sampling_session_id": "<sampler>",
    "seq_id": "<seq>",
    "prompt": {"chunks": [{"type": "encoded_text", "tokens": [1, 2, 3]}]},
    "num_samples": 2,
    "sampling_params": SAMPLING,
    "prompt_logprobs": True,
    "topk_prompt_logprobs": 1,
    "topk_sample_logprobs": 1,
    "target_prompt_logprobs": {"data": [1, 2], "dtype": "int64", "shape": [2, 1]},
}
POLL = {"target": {"type": "sampling_session", "sampling_session_id": "<sampler>"}, "prev_cursor": 0, "timeout": 0}
SEARCH = {
    "session_id": "<session>",
    "project_ids": ["p"],
    "user_metadata": {"a": "b"},
    "display_name": "d",
    "owner": {"type": "user", "owner_urns": ["tml:organization_user:x"]},
    "statuses": [{"type": "client_finished", "reasons": ["success"]}],
    "limit": 5,
    "cursor": {"last_created_at": "2026-01-01T00:00:00Z", "last_session_id": "x"},
}
GENERATION = {
    "model": "<model>",
    "max_tokens": 3,
    "n": 1,
    "seed": 1,
    "temperature": 1.0,
    "top_p": 1.0,
    "stop": ["a"],
    "stream": False,
    "frequency_penalty": 0.5,
    "presence_penalty": 0.5,
    "logit_bias": {"5": 1.0},
    "return_token_ids": True,
}
CALL = {"id": "c", "type": "function", "function": {"name": "f", "arguments": '{"a": 1}'}}
CHAT = {
    **GENERATION,
    "messages": [
        {"role": "system", "content": "s"},
        {"role": "user", "content": [{"type": "text", "text": "hello"}]},
        {"role": "assistant", "content": None, "tool_calls": [CALL]},
        {"role": "tool", "tool_call_id": "c", "content": "1"},
    ],
    "logprobs": True,
    "top_logprobs": 2,
    "tools": [{"type": "function", "function": {"name": "f", "description": "d", "parameters": {"type": "object"}}}],
    "tool_choice": "auto",
}
COMPLETION = {**GENERATION, "prompt": [[1, 2], [3]], "logprobs": 2}
STREAM = {"stream": True, "stream_options": {"include_usage": True}}


@dataclass(frozen=True, slots=True)
class Seed:
    """`names`: what stands in the path, where it is not what `PARAMETERS` has. `body`: JSON, or a protobuf message, or nothing."""

    body: dict[str, object] | pb.ForwardBackwardRequest | None = None
    query: Mapping[str, str] = field(default_factory=dict)
    names: Mapping[str, str] = field(default_factory=dict)
    headers: Mapping[str, str] = field(default_factory=dict)


PARAMETERS: Mapping[str, str] = {
    "session_id": "<session>",
    "run_id": "<run>",
    "sampler_id": "<sampler>",
    "kind": "weights",
    "name": KEPT,
    "model": "<model>",
    "artifact": "<artifact>",
    "file": FILE,
}


def protobuf_pass() -> pb.ForwardBackwardRequest:
    """A dense and a sparse tensor, spans and a config; its model and its number are filled in by whoever sends it."""
    message = pb.ForwardBackwardRequest(model_id="m", seq_id=1, loss_fn="cross_entropy")
    datum = message.data.add()
    datum.model_input.add().encoded_text.tokens = b"\1\0\0\0\2\0\0\0"
    datum.loss_fn_inputs["weights"].CopyFrom(pb.Tensor(dense=b"\0\0\x80\x3f" * 2, dtype=1, shape=[2]))
    sparse = datum.loss_fn_inputs["target_tokens"]
    sparse.sparse_csr.values = b"\2" + bytes(7) + b"\3" + bytes(7)
    sparse.sparse_csr.crow_indices = b"".join(row.to_bytes(8, "little") for row in (0, 1, 2))
    sparse.sparse_csr.col_indices = bytes(16)
    sparse.dtype, sparse.shape[:] = 2, [2, 4]
    datum.model_input_spans.add().prompt_tokens.length = 2
    return message


def _page(**query: str) -> tuple[Seed, ...]:
    return (Seed(query={"offset": "0", "limit": "5", "access_scope": "accessible", **query}),)


_HOURS = {"starting_on": "2026-01-01T00:00:00Z", "ending_before": "2026-01-01T05:00:00+00:00"}


def _link(what: str) -> tuple[Seed, ...]:
    return (Seed(query={part: f"<{what}_{part}>" for part in LINK_PARTS}),)


_CHECKPOINT = "/api/v1/training_runs/{run_id}/checkpoints/{kind}/{name}"

SEEDS: Mapping[str, tuple[Seed, ...]] = {
    "POST /api/v1/auth/token": (Seed({}),),
    "GET /api/v1/auth/apikey/me": (Seed(),),
    "DELETE /api/v1/auth/apikey/me": (Seed(),),
    "GET /api/v1/healthz": (Seed(),),
    "POST /api/v1/client/config": (Seed({"sdk_version": "0.38.0"}),),
    "POST /api/v1/client/dynamic_config": (Seed({"sdk_version": "0.38.0"}),),
    "GET /api/v1/get_server_capabilities": (Seed(),),
    "POST /api/v1/create_session": (
        Seed({"tags": ["a"], "user_metadata": {"a": "b"}, "sdk_version": "0.38.0", "project_id": "p", "display_name": "d"}),
    ),
    "POST /api/v1/session_heartbeat": (Seed({"session_id": "<session>"}),),
    "POST /api/v1/sessions/{session_id}/finish": (Seed({"reason": {"type": "success"}}, names={"session_id": "<spare_session>"}),),
    "POST /api/v1/telemetry": (Seed({"events": [{"event": "x"}], "session_id": "<session>"}),),
    "GET /api/v1/sessions": _page(),
    "GET /api/v1/sessions/{session_id}": _page(),
    "PUT /api/v1/sessions/{session_id}/project": (Seed({"project_id": "p"}),),
    "POST /api/v1/sessions/search": (Seed(SEARCH),),
    "POST /api/v1/create_model": (
        Seed(
            {
                "session_id": "<session>",
                "model_seq_id": "<seq>",
                "base_model": "<base>",
                "user_metadata": {"a": "b"},
                "lora_config": {"rank": 8, "seed": 1, "train_mlp": True, "train_attn": True, "train_unembed": False},
                "optimizer_config": {"type": "adamw"},
            }
        ),
    ),
    "POST /api/v1/get_info": (Seed({"model_id": "<run>"}),),
    "POST /api/v1/forward": (Seed(TURN | {"forward_input": PASS}), Seed(protobuf_pass())),
    "POST /api/v1/forward_backward": (
        Seed(TURN | {"forward_backward_input": PASS}),
        Seed(TURN | {"forward_backward_input": SPARSE_PASS}),
        Seed(TURN | {"forward_backward_input": PASS | {"loss_fn": "custom", "loss_fn_config": {"loss_id": "<loss>"}}}),
        Seed(protobuf_pass()),
        Seed(protobuf_pass()),
    ),
    "POST /api/v1/optim_step": (Seed(TURN | {"adam_params": ADAM, "optimizer_params": {"type": "adamw"}}),),
    "POST /api/v1/unload_model": (Seed({"model_id": "<spare_run>"}),),
    "POST /api/v1/create_custom_loss": (
        Seed(
            {
                "session_id": "<session>",
                "custom_loss_seq_id": "<seq>",
                "name": "x",
                "graph": GRAPH,
                "inputs": [{"name": "logprobs", "rank": 1}],
            }
        ),
    ),
    "POST /api/v1/save_weights": (Seed(TURN | {"path": "n", "ttl_seconds": 3600, "overwrite": True, "user_metadata": {"a": "b"}}),),
    "POST /api/v1/save_weights_for_sampler": (
        Seed(TURN | {"path": "n", "ttl_seconds": 3600, "overwrite": True}),
        Seed(TURN | {"sampling_session_seq_id": "<seq>", "kind": "inflight"}),
    ),
    "POST /api/v1/load_weights": (
        Seed(TURN | {"path": "<path>", "optimizer": True, "optimizer_config": {"type": "adamw"}, "weights_access_token": "tml-x"}),
        Seed({"session_id": "<session>", "model_seq_id": "<seq>", "path": "<path>", "base_model": "<base>"}),
    ),
    "POST /api/v1/create_sampling_session": (
        Seed({"session_id": "<session>", "sampling_session_seq_id": "<seq>", "base_model": "<base>", "model_path": "<sampler_path>"}),
    ),
    "POST /api/v1/join_sampling_session": (Seed({"sampling_session_id": "<sampler>"}),),
    "GET /api/v1/samplers/{sampler_id}": (Seed(),),
    "POST /api/v1/asample": (Seed(SAMPLE), Seed(SAMPLE | {"prompt_alt_tokens_k": 2, "prompt_logprobs_last_n": 1})),
    "POST /api/v1/retrieve_future": (
        Seed({"request_id": "<future>", "allow_metadata_only": True}),
        Seed({"request_id": "<sample>", "allow_metadata_only": False}),
    ),
    "POST /api/v1/cancel_future": (Seed({"request_id": "<future>"}),),
    "POST /api/v1/retrieve_futures": (Seed(POLL | {"retrieved_request_ids": ["<sample>"]}),),
    "GET /api/v1/training_runs": _page(project_id="p"),
    "GET /api/v1/training_runs/{run_id}": _page(),
    "POST /api/v1/weights_info": (Seed({"tinker_path": "<path>"}),),
    "GET /api/v1/checkpoints": _page(),
    "GET /api/v1/training_runs/{run_id}/checkpoints": _page(),
    f"DELETE {_CHECKPOINT}": (Seed(names={"name": SPARE}),),
    f"POST {_CHECKPOINT}/publish": (Seed({}),),
    f"DELETE {_CHECKPOINT}/publish": (Seed(),),
    f"PUT {_CHECKPOINT}/ttl": (Seed({"ttl_seconds": 3600}),),
    "POST /api/v1/save_weights_external": (
        Seed(TURN | {"path": "n", "ttl_seconds": 3600, "user_metadata": {"a": "b"}, "age_encryption_recipients": []}),
    ),
    f"GET {_CHECKPOINT}/external_weights_urls": (Seed(names={"kind": "external_weights"}),),
    f"GET {_CHECKPOINT}/archive": (Seed(names={"kind": "sampler_weights"}),),
    "POST /api/v1/copy_weights": (
        Seed({"source_path": "<path>", "session_id": "<session>", "model_seq_id": "<seq>", "ttl_seconds": 3600}),
        Seed({"source_path": "<path>", "destination_project_id": "p"}, headers={"x-idempotency-key": "k"}),
    ),
    "GET /api/v1/audit": (Seed(query={"event_type": "all", "day": "2026-01-01"}),),
    "GET /api/v1/billing/usage/events": (Seed(query=_HOURS),),
    "GET /api/v1/billing/usage/checkpoints/current": (Seed(query={"project_id": "p"}),),
    "GET /api/v1/sessions/{session_id}/trace_export": (Seed(),),
    "GET /api/v1/downloads/traces/{session_id}": _link("trace"),
    "GET /api/v1/downloads/files/{artifact:path}/{file}": _link("file"),
    "GET /api/v1/downloads/archives/{artifact:path}": _link("archive"),
    "GET /v1/models": (Seed(),),
    "GET /v1/models/{model:path}": (Seed(),),
    "POST /v1/completions": (Seed(COMPLETION), Seed(COMPLETION | STREAM), Seed(COMPLETION | {"model": "<sampler_path>", "prompt": "a b"})),
    "POST /v1/chat/completions": (Seed(CHAT), Seed(CHAT | STREAM)),
}

ENDING = frozenset({"POST /api/v1/sessions/{session_id}/finish", "POST /api/v1/unload_model", f"DELETE {_CHECKPOINT}"})
# In open mode there is neither a token nor a key.
REFUSED = frozenset({"POST /api/v1/auth/token", "DELETE /api/v1/auth/apikey/me"})


class Asks(Protocol):
    def __call__(self, method: str, path: str, /, **body: object) -> dict[str, Any]: ...


def furnished(host: str, port: int, base: str) -> dict[str, str]:
    """One of everything on a server with engines that run, by the marks of the seeds."""
    connection = http.client.HTTPConnection(host, port, timeout=60)

    def ask(method: str, path: str, /, **body: object) -> dict[str, Any]:
        headers = {"content-type": "application/json", "accept": "application/json"}
        connection.request(method, f"/api/v1/{path}", json.dumps(body) if method == "POST" else None, headers)
        answer = connection.getresponse()
        text = answer.read()
        assert answer.status in (200, 408), text
        decoded: dict[str, Any] = json.loads(text)
        assert "error" not in decoded, decoded
        return decoded

    try:
        ids = _furnished(ask, base)
        return ids | _linked(ask, ids)
    finally:
        connection.close()


def _furnished(ask: Asks, base: str) -> dict[str, str]:
    session, spare = (ask("POST", "create_session", tags=[])["session_id"] for _ in range(2))
    runs = [ask("POST", "create_model", session_id=session, model_seq_id=number, base_model=base) for number in range(2)]
    run = runs[0]["model_id"]
    turns = [
        ("save_weights", {"path": KEPT}),
        ("save_weights", {"path": SPARE}),
        ("save_weights_for_sampler", {"path": KEPT}),
        ("save_weights_external", {"path": KEPT}),
    ]
    done = [ask("POST", path, model_id=run, seq_id=seq, **body)["request_id"] for seq, (path, body) in enumerate(turns, 1)]
    opened = ask("POST", "create_sampling_session", session_id=session, sampling_session_seq_id=0, base_model=base)
    sampler = opened["sampling_session_id"]
    asked = SAMPLE | {"sampling_session_id": sampler, "seq_id": 0}
    sample = ask("POST", "asample", **asked)["request_id"]
    inputs = [{"name": "logprobs", "rank": 1}]
    loss = ask("POST", "create_custom_loss", session_id=session, custom_loss_seq_id=0, name="x", inputs=inputs, graph=GRAPH)
    for rid in (*done, sample):
        while ask("POST", "retrieve_future", request_id=rid).get("type") == "try_again":
            pass
    return {
        "<session>": session,
        "<spare_session>": spare,
        "<run>": run,
        "<spare_run>": runs[1]["model_id"],
        "<base>": base,
        "<model>": base,
        "<sampler>": sampler,
        "<sampler_path>": f"tinker://{run}/sampler_weights/{KEPT}",
        "<path>": f"tinker://{run}/weights/{KEPT}",
        "<future>": done[0],
        "<sample>": sample,
        "<loss>": loss["request_id"],
    }


def _linked(ask: Asks, ids: Mapping[str, str]) -> dict[str, str]:
    """The artifact behind the external checkpoint, and what makes a link to it, to its archive and to a trace valid."""
    checkpoints = f"training_runs/{ids['<run>']}/checkpoints"
    file = urlsplit(ask("GET", f"{checkpoints}/external_weights/{KEPT}/external_weights_urls")["urls"][FILE])
    archive = urlsplit(ask("GET", f"{checkpoints}/external_weights/{KEPT}/archive")["url"])
    trace = urlsplit(ask("GET", f"sessions/{ids['<session>']}/trace_export")["url"])
    links = {"file": file, "archive": archive, "trace": trace}
    parts = {f"<{what}_{part}>": dict(parse_qsl(link.query))[part] for what, link in links.items() for part in LINK_PARTS}
    return parts | {"<artifact>": file.path.split("/downloads/files/")[1].removesuffix(f"/{FILE}")}
