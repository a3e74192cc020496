"""A real server under fault, and callers of its native protocol that measure what they get.

Its bounds are small, so that waiting for them is short; every bound asserted in this folder follows from the constants here.
"""

import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import redis

from tests.server_process import ServerProcess
from tinsmith.engines.fake_faults import FAULT_TOKEN, Fault
from tinsmith.protocol import native
from tinsmith.protocol.native import StrictRequest

MODEL = "HuggingFaceTB/SmolLM2-135M-Instruct"
E_S = 2.0  # execution.timeout_s: one engine call. A slow call, of SLOW_MS, stays below it
TRANSFER_S = 3.0  # of a call that moves a whole adapter; shortened from an hour by `bounds/sitecustomize.py`
LEASE_S = 2.0
QUEUE_S = 60.0  # a lane that does not move; longer than an engine that hangs takes to be replaced (2 x TRANSFER_S + RESTART_S)
GRACE_S = 3.0  # a missing seq id holds its lane back
LONG_POLL_S = 5.0
SESSION_S = 600.0  # no session of a test ends by its silence
PASS_S = 5.0  # of the janitor, from pass to pass
SLOW_MS = 800
SNAPSHOT_ENGINE_S = 0.5  # below a slow call, so that one makes its model due for a snapshot
# From a death, or from the end of a bound, to a replica that serves: Serve asks for health every 2 s and starts a process, which imports
# the server. 2 to 7 s were measured on two cores that did little beside; starts of whole servers took five times as long on busy ones.
RESTART_S = 40.0
PROMPT_S = 5.0  # an answer that waits for nothing, on a machine that starts a process at the same time
RETRY_S = 0.2

_BOUNDS = Path(__file__).parent / "bounds"


def start(checkpoints: Path, *, redis_url: str | None = None, env: dict[str, str] | None = None, **sections: Any) -> ServerProcess:
    """A server with fake engines and the bounds above; over Redis, or with its own memory. `sections` are laid over the configuration."""
    trainer = {"engine": "fake", "max_adapters": 4, **sections.pop("trainer", {})}
    execution = {
        "timeout_s": E_S,
        "lease_s": LEASE_S,
        "queue_timeout_s": QUEUE_S,
        "hole_grace_s": GRACE_S,
        "long_poll_s": LONG_POLL_S,
        "session_timeout_s": SESSION_S,
        **sections.pop("execution", {}),
    }
    config = {
        "models": [{"name": MODEL, "trainer": trainer, "sampler": {"engine": "fake"}}],
        "checkpoints": {"dir": str(checkpoints), "snapshot_engine_s": SNAPSHOT_ENGINE_S},
        "store": {"kind": "memory"} if redis_url is None else {"kind": "redis", "url": redis_url},
        "execution": execution,
        "limits": {"max_pending": 20_000},
        **sections,
    }
    return ServerProcess.start(config, env={"PYTHONPATH": str(_BOUNDS), "CHAOS_TRANSFER_S": str(TRANSFER_S), **(env or {})})


@dataclass(frozen=True)
class Ended:
    """`saw`: "completed", or the reason code. seconds: from the submit to the answer."""

    saw: str
    seconds: float
    result: Any = None


class Unsettled(AssertionError):
    """A future that had not ended at its bound."""


@dataclass
class Task:
    """A submitted command."""

    caller: "Caller"
    request_id: str
    began: float

    def end(self, bound_s: float) -> Ended:
        """Wait for its end as a client does, through whatever the gateways go. Raises Unsettled."""
        while True:
            envelope = self.caller.ask("/retrieve_future", {"request_id": self.request_id}, until=self.began + bound_s)
            seconds = time.monotonic() - self.began
            if "status" not in envelope:
                return Ended(envelope["reason"], seconds)
            if envelope["status"] == "completed":
                return Ended("completed", seconds, envelope["result"])
            if envelope["status"] in ("failed", "cancelled"):
                return Ended(envelope["error"]["reason"], seconds)
            if seconds > bound_s:
                raise Unsettled(f"{self.request_id} is {envelope['status']} ({envelope['queue_state_reason']}) after {seconds:.1f} s")


class Caller:
    """A caller with a session of its own."""

    def __init__(self, url: str) -> None:
        self.url = url
        self.http = httpx.Client(base_url=url + native.PREFIX, timeout=60)
        self.session_id: str = self.ask("/create_session", {})["session_id"]
        self.request_ids: list[str] = []
        self._num_models = 0
        self._num_samplers = 0

    def __enter__(self) -> "Caller":
        return self

    def __exit__(self, *_: object) -> None:
        self.http.close()

    def ask(self, path: str, body: dict[str, Any], *, until: float | None = None) -> Any:
        """The answer's body. A lost connection and a 503 are met by asking again, for as long as a client would."""
        deadline = time.monotonic() + RESTART_S if until is None else until
        while True:
            try:
                answer = self.http.post(path, json=body)
                if answer.status_code != httpx.codes.SERVICE_UNAVAILABLE:
                    return answer.json()
                failure: object = answer.text
            except httpx.TransportError as error:
                failure = repr(error)
            if time.monotonic() > deadline:
                raise Unsettled(f"{path}: {failure}")
            time.sleep(RETRY_S)

    def submit(self, path: str, body: dict[str, Any]) -> Task:
        """Raises AssertionError for a refusal."""
        began = time.monotonic()
        envelope = self.ask(path, body)
        assert "status" in envelope, envelope
        self.request_ids.append(envelope["request_id"])
        return Task(self, envelope["request_id"], began)

    def creating(self, **options: Any) -> tuple["Model", Task]:
        """A model and the task of its creation. `options`: fields of CreateModel."""
        number = self._num_models
        self._num_models += 1
        fields = {"base_model": MODEL, "lora": {"rank": 4, "seed": number}, **options}
        task = self.submit("/create_model", {"session_id": self.session_id, "model_seq": number, **fields})
        return Model(self, f"{self.session_id}:train:{number}"), task

    def model(self, *, bound_s: float = RESTART_S, **options: Any) -> "Model":
        model, task = self.creating(**options)
        saw = task.end(bound_s).saw
        assert saw == "completed", saw
        return model

    def seeded(self, seed: int) -> "Model":
        """A model that asks for a fault by its seed."""
        return self.model(lora={"rank": 4, "seed": seed})

    def sampler(self, checkpoint: str | None = None) -> "Sampler":
        number = self._num_samplers
        self._num_samplers += 1
        subject = {"base_model": MODEL} if checkpoint is None else {"checkpoint": checkpoint}
        created = self.ask("/create_sampler", {"session_id": self.session_id, "sampler_seq": number, **subject})
        return Sampler(self, created["sampler_id"])

    def end_session(self) -> None:
        self.ask("/end_session", {"session_id": self.session_id})

    def processes(self, role: str) -> list[dict[str, Any]]:
        """Of the living ones, as /status tells."""
        answer = self.http.get("/status")
        assert answer.status_code == httpx.codes.OK, answer.text
        return [process for process in answer.json()["processes"] if process["role"] == role]


@dataclass
class Model:
    caller: Caller
    id: str
    next_seq: int = 1

    def submit(self, request: type[StrictRequest], **fields: Any) -> Task:
        """Its next call."""
        seq, self.next_seq = self.next_seq, self.next_seq + 1
        return self.caller.submit(request.path, {"model_id": self.id, "seq_id": seq, **fields})

    def forward(self) -> Task:
        """A call that every healthy model takes."""
        return self.submit(native.Forward, **batch(1, 2, 3))

    def unload(self) -> None:
        self.caller.ask("/unload_model", {"model_id": self.id})


@dataclass
class Sampler:
    caller: Caller
    id: str
    next_seq: int = 1

    def body(self, *prompt: int, max_tokens: int = 4, **fields: Any) -> dict[str, Any]:
        seq, self.next_seq = self.next_seq, self.next_seq + 1
        sampling = {"max_tokens": max_tokens, "seed": 5, "stop": []}
        return {"sampler_id": self.id, "seq_id": seq, "prompt_ids": list(prompt), "sampling": sampling, **fields}

    def sample(self, *prompt: int, max_tokens: int = 4, **fields: Any) -> Task:
        return self.caller.submit("/sample", self.body(*prompt, max_tokens=max_tokens, **fields))


def batch(*tokens: int) -> dict[str, Any]:
    """The data of one sequence for a pass with cross entropy."""
    return {"batch": {"input_ids": list(tokens), "inputs": {"target_tokens": [*tokens[1:], 4], "weights": [1.0] * len(tokens)}}}


def faulty(fault: Fault, ms: int = SLOW_MS) -> dict[str, Any]:
    return batch(FAULT_TOKEN, int(fault), ms)


def until(condition: Callable[[], bool], bound_s: float, what: str) -> float:
    """Wait for what nobody tells of; answers how long it took."""
    began = time.monotonic()
    while not condition():
        seconds = time.monotonic() - began
        assert seconds < bound_s, f"{what}: not within {bound_s:.0f} s"
        time.sleep(0.1)
    return time.monotonic() - began


class Keys:
    """What lies in a Redis, for those who look for leaks."""

    # What may outlive a session: the records of catalog, closed lanes and futures, the lists that end those in time, and capped logs of
    # events.
    KEPT = ("fut:", "requests:", "lane:", "table:", "ended:", "settled", "fetched", "topic:")

    def __init__(self, url: str) -> None:
        self._client = redis.Redis.from_url(url, decode_responses=False)

    def leaked(self, caller: Caller) -> list[str]:
        """Keys that are none of those and speak of the caller's session or of one of its requests, by name or in what they hold."""
        names = [name.encode() for name in (caller.session_id, *caller.request_ids)]
        kept = tuple(prefix.encode() for prefix in self.KEPT)
        found = [key for key in self._client.scan_iter(count=10_000) if not key.startswith(kept)]
        return [key.decode() for key in found if any(name in text for text in (key, *self._contents(key)) for name in names)]

    def close(self) -> None:
        self._client.close()

    def _contents(self, key: bytes) -> list[bytes]:
        match self._client.type(key):
            case b"set":
                return list(self._client.smembers(key))
            case b"zset":
                return list(self._client.zrange(key, 0, -1))
            case b"hash":
                return [text for pair in self._client.hgetall(key).items() for text in pair]
            case _:
                return []  # strings, which bodies and results are: their names tell whose they are
