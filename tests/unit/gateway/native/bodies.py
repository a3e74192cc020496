"""One sound body for every route of the native protocol."""

from typing import Any

from tests.fakes.face import BASE, Face
from tinsmith.protocol.native import REQUESTS, StrictRequest
from tinsmith.protocol.sessions import BaseModelInfo

BATCH = {"input_ids": [[1, 2, 3]], "inputs": {"target_tokens": [[2, 3, 4]], "weights": [[1, 1, 0.5]]}}
ROUTES: dict[str, type[StrictRequest]] = {request.path: request for request in REQUESTS}

_BODIES: dict[str, dict[str, Any]] = {
    "/create_session": {"tags": ["a"], "metadata": {"k": "v"}, "project_id": "p", "display_name": "d"},
    "/heartbeat": {"session_id": "SESSION"},
    "/end_session": {"session_id": "SESSION", "reason": "success"},
    "/create_model": {
        "session_id": "SESSION",
        "model_seq": 1,
        "base_model": BASE,
        "lora": {"rank": 8, "seed": 5},
        "optimizer": {"type": "adamw", "learning_rate": 0.1},
        "schedule": {"kind": "cosine", "warmup_steps": 1, "total_steps": 10, "final_fraction": 0.1},
    },
    "/unload_model": {"model_id": "MODEL"},
    "/forward": {"model_id": "MODEL", "seq_id": 1, "batch": BATCH},
    "/forward_backward": {"model_id": "MODEL", "seq_id": 1, "batch": BATCH, "micro_batch_tokens": 64},
    "/evaluate": {"model_id": "MODEL", "seq_id": 1, "batch": BATCH},
    "/optim_step": {"model_id": "MODEL", "seq_id": 1, "optimizer": {"type": "adamw", "max_grad_norm": 1.0}},
    "/train_step": {"model_id": "MODEL", "seq_id": 1, "batch": BATCH, "optimizer": {"type": "adamw"}},
    "/save_weights": {"model_id": "MODEL", "seq_id": 1, "name": "n", "ttl_s": 3600},
    "/load_weights": {"model_id": "MODEL", "seq_id": 1, "checkpoint": "tinker://s:train:0/weights/n"},
    "/publish_sampler_weights": {"model_id": "MODEL", "seq_id": 1, "name": "n"},
    "/create_sampler": {"session_id": "SESSION", "sampler_seq": 3, "base_model": BASE},
    "/sample": {
        "sampler_id": "SAMPLER",
        "seq_id": 0,
        "prompt_ids": [1, 2],
        "num_samples": 2,
        "sampling": {"max_tokens": 4, "temperature": 0.5, "top_k": 3, "top_p": 0.9, "seed": 7},
    },
    "/sample_stream": {"sampler_id": "SAMPLER", "seq_id": 0, "prompt_ids": [1, 2]},
    "/retrieve_future": {"request_id": "FUTURE"},
    "/retrieve_futures": {"request_ids": ["FUTURE"]},
    "/cancel": {"request_id": "FUTURE"},
    "/drain": {"process_id": "nobody"},
}


async def furnished(face: Face) -> dict[str, str]:
    """What the placeholders stand for: a session with a model, a sampler, and the future of the model's creation."""
    session_id = (await face.native_ok("/create_session", {}))["session_id"]
    created = await face.native_ok("/create_model", {"session_id": session_id, "model_seq": 0, "base_model": BASE, "lora": {"rank": 8}})
    sampler = await face.native_ok("/create_sampler", {"session_id": session_id, "sampler_seq": 0, "base_model": BASE})
    return {"SESSION": session_id, "MODEL": f"{session_id}:train:0", "SAMPLER": sampler["sampler_id"], "FUTURE": created["request_id"]}


def body_of(path: str, names: dict[str, str] | None = None, **changes: object) -> dict[str, Any]:
    """The route's body, with placeholders filled and fields replaced."""
    return _filled(_BODIES[path], names or {}) | changes


def tiny(info: BaseModelInfo) -> BaseModelInfo:
    """A base model with a real tokenizer, under the name that faces serve."""
    return info.model_copy(update={"name": BASE})


def _filled(tree: Any, names: dict[str, str]) -> Any:
    if isinstance(tree, dict):
        return {key: _filled(part, names) for key, part in tree.items()}
    if isinstance(tree, list):
        return [_filled(part, names) for part in tree]
    return names.get(tree, tree) if isinstance(tree, str) else tree
