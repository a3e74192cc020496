"""Every field of every body, replaced by what does not belong there: a user error or a promise, never a fault of the server."""

import json
from collections.abc import Iterator
from typing import Any

import pytest

from tests.fakes.face import BASE, INFO, Face
from tests.unit.gateway.test_sampling import body_of
from tinsmith.protocol.futures import MAX_MESSAGE

ODD: tuple[object, ...] = (
    *(None, True, -1, 2**31, 2**63, 10**400, 1.5, 1e308, float("nan"), float("inf")),
    *("", "x" * 3000, "\x00\n", "é\U0001f600", "../../etc", "tinker://a/weights/b", [], {}, [[]], {"a": None}),
)
TENSOR = {"data": [1, 2], "dtype": "int64", "shape": [2], "sparse_crow_indices": None, "sparse_col_indices": None}
DATUM = {"model_input": {"chunks": [{"type": "encoded_text", "tokens": [1, 2]}]}, "loss_fn_inputs": {"target_tokens": TENSOR}}
PASS = {"data": [DATUM], "loss_fn": "cross_entropy", "loss_fn_config": {}}
TURN = {"model_id": "MODEL", "seq_id": 1}
ADAM = {"learning_rate": 1e-4, "beta1": 0.9, "beta2": 0.95, "eps": 1e-12, "weight_decay": 0.0, "grad_clip_norm": 0.0}
LORA = {"rank": 8, "seed": 1, "train_mlp": True, "train_attn": True, "train_unembed": True}
SAVED = "tinker://s:train:0/weights/n"
PARAMS = {"max_tokens": 4, "seed": 5, "temperature": 1, "top_k": -1, "top_p": 1, "stop": ["a"]}

BODIES: dict[str, dict[str, Any]] = {
    "/create_session": {"tags": ["a"], "user_metadata": {"a": 1}, "sdk_version": "1", "project_id": "p", "display_name": "d"},
    "/session_heartbeat": {"session_id": "SESSION"},
    "/sessions/nobody/finish": {"reason": {"type": "success"}, "detail": None},
    "/create_model": {
        "session_id": "SESSION",
        "model_seq_id": 1,
        "base_model": BASE,
        "lora_config": LORA,
        "optimizer_config": {"type": "adamw"},
    },
    "/get_info": {"model_id": "MODEL"},
    "/unload_model": {"model_id": "nobody"},
    "/forward": TURN | {"forward_input": PASS},
    "/forward_backward": TURN | {"forward_backward_input": PASS},
    "/optim_step": TURN | {"adam_params": ADAM, "optimizer_params": None},
    "/save_weights": TURN | {"path": "n", "ttl_seconds": 3600, "overwrite": False, "user_metadata": {"a": "b"}},
    "/save_weights_for_sampler": TURN | {"path": "n", "sampling_session_seq_id": None, "kind": "snapshot"},
    "/load_weights": TURN | {"session_id": "SESSION", "model_seq_id": 1, "path": SAVED, "optimizer": True, "base_model": None},
    "/weights_info": {"tinker_path": SAVED},
    "/create_sampling_session": {"session_id": "SESSION", "sampling_session_seq_id": 9, "base_model": BASE, "model_path": None},
    "/asample": body_of("SAMPLER", sampling_params=PARAMS, prompt_logprobs=True, topk_prompt_logprobs=1),
    "/retrieve_future": {"request_id": "nothing", "allow_metadata_only": True},
    "/cancel_future": {"request_id": "nothing"},
    "/client/config": {"sdk_version": "0.38.0"},
    "/telemetry": {"events": []},
}


def odd_ones(body: Any) -> Iterator[Any]:
    """The body with one of its parts replaced, for each part and each odd value."""
    yield from ODD
    items = body.items() if isinstance(body, dict) else enumerate(body) if isinstance(body, list) else ()
    for key, part in items:
        for odd in odd_ones(part):
            changed = body.copy()
            changed[key] = odd
            yield changed


@pytest.mark.proves("R13", "R15")
@pytest.mark.parametrize("route", BODIES)
async def test_odd_bodies_are_never_the_server_s_fault(face: Face, route):
    session_id = await face.session()
    model_id = await face.model(session_id)
    sampling = {"session_id": session_id, "sampling_session_seq_id": 0, "base_model": BASE}
    names = {
        "SESSION": session_id,
        "MODEL": model_id,
        "SAMPLER": (await face.ok("/create_sampling_session", sampling))["sampling_session_id"],
    }
    for count, body in enumerate(odd_ones(BODIES[route])):
        text = json.dumps(body).replace('"seq_id": 1', f'"seq_id": {count + 1}')
        for name, known in names.items():
            text = text.replace(f'"{name}"', f'"{known}"')
        answer = await face.http.post(f"/api/v1{route}", content=text.encode(), headers={"content-type": "application/json"})
        assert answer.status_code < 500, (text[:500], answer.text)
        told = answer.json().get("detail", "") if answer.status_code != 200 else await failure(face, answer.json())
        assert told or answer.status_code == 200, text[:500]
        assert len(told) <= MAX_MESSAGE
        assert not any(secret in told for secret in ("\n", INFO.path, "Traceback"))


async def failure(face: Face, promise: dict[str, Any]) -> str:
    """Why the promised future failed at birth; a failure of the server's is none that a body may cause."""
    record = await face.lanes.look("local", str(promise.get("request_id")))
    if record is None or record.failure is None:
        return ""
    assert record.failure.category == "user"
    return record.failure.message
