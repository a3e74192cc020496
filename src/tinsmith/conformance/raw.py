"""Requests of the wire without an SDK: what clients of older releases send, and what none would."""

import time
from collections.abc import Mapping
from types import TracebackType
from typing import Any, Self

import httpx

from tinsmith.conformance.items import WITHIN_S, Mismatch, Target, expect_equal

PREFIX = "/api/v1/"
JSON = "application/json"
PROTOBUF = "application/x-protobuf"
POLL_S = 45.0  # after which a client no longer waits for the answer to a poll

Json = dict[str, Any]


class Wire:
    """Requests of one key. Answers that are no success are given back as they are, where no method says otherwise."""

    def __init__(self, target: Target) -> None:
        self._model = target.model
        self._http = httpx.Client(base_url=target.base_url, headers={"x-api-key": target.api_key}, timeout=POLL_S, follow_redirects=False)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._http.close()

    def post(self, path: str, body: object, headers: Mapping[str, str] | None = None) -> httpx.Response:
        return self._http.post(PREFIX + path, json=body, headers=headers)

    def send(self, method: str, path: str, content: bytes = b"", headers: Mapping[str, str] | None = None) -> httpx.Response:
        return self._http.request(method, PREFIX + path, content=content, headers=headers)

    def get(self, path: str, headers: Mapping[str, str] | None = None) -> httpx.Response:
        return self._http.get(PREFIX + path, headers=headers)

    def ok(self, path: str, body: object, headers: Mapping[str, str] | None = None) -> Json:
        """Raises Mismatch for another status than 200."""
        response = self.post(path, body, headers)
        expect_equal(response.status_code, 200, f"status of {path} ({response.text[:200]})")
        return dict(response.json())

    def session(self) -> str:
        return str(self.ok("create_session", {"tags": [], "user_metadata": None, "sdk_version": "0.16.1"})["session_id"])

    def model(self, session_id: str, number: int = 0) -> str:
        """A model that exists. Raises Mismatch."""
        body = {
            "session_id": session_id,
            "model_seq_id": number,
            "base_model": self._model,
            "user_metadata": None,
            "lora_config": {"rank": 8},
        }
        made = self.done(self.ok("create_model", body)["request_id"])
        expect_equal(made.json().get("model_id"), f"{session_id}:train:{number}", "model_id")
        return str(made.json()["model_id"])

    def poll(self, request_id: str, accept: str = JSON) -> httpx.Response:
        """One long poll."""
        return self.post("retrieve_future", {"request_id": request_id}, {"accept": accept})

    def done(self, request_id: str, accept: str = JSON, within_s: float = WITHIN_S) -> httpx.Response:
        """The answer when it is no longer pending. Raises Mismatch where it stays so."""
        deadline = time.monotonic() + within_s
        while time.monotonic() < deadline:
            response = self.poll(request_id, accept)
            is_pending = response.status_code == 408 or (
                response.headers.get("content-type", "").startswith(JSON) and _says_again(response)
            )
            if not is_pending:
                return response
        raise Mismatch(f"{request_id}: still pending after {within_s:.0f} s")


def _says_again(response: httpx.Response) -> bool:
    told = response.json()
    return isinstance(told, dict) and told.get("type") == "try_again"


def chunks(ids: list[int]) -> Json:
    """A prompt as the first releases send it: their chunks have no type."""
    return {"chunks": [{"tokens": ids}]}


def passed(key: str, ids: list[int], model_id: str, seq_id: int) -> Json:
    """The body of /forward and /forward_backward up to 0.22; `key` tells which."""
    inputs = {
        "target_tokens": {"data": ids[1:], "dtype": "int64", "shape": [len(ids) - 1]},
        "weights": {"data": [1] * (len(ids) - 1), "dtype": "float32"},
    }
    datum = {"model_input": chunks(ids[:-1]), "loss_fn_inputs": inputs}
    return {key: {"data": [datum], "loss_fn": "cross_entropy", "loss_fn_config": None}, "model_id": model_id, "seq_id": seq_id}


def first_model(base_url: str, api_key: str) -> str:
    """The first base model that can be trained and sampled, as far as the server tells. Raises LookupError where there is none."""
    told = httpx.get(base_url.rstrip("/") + PREFIX + "get_server_capabilities", headers={"x-api-key": api_key}, timeout=POLL_S)
    models: list[Json] = told.raise_for_status().json()["supported_models"]
    for model in models:
        if model.get("trainable", True) and model.get("sampleable", True):
            return str(model["model_name"])
    raise LookupError(f"none of the server's {len(models)} models can be both trained and sampled")
