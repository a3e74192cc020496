"""The sampling backend over a scripted engine: adapters, refusals, calls that raise, calls that hang."""

import asyncio
import threading
from array import array
from collections.abc import Callable, Sequence

import pytest

from tinsmith import telemetry
from tinsmith.deployments.sampling_backend import PATIENCE_STEPS, QUEUE_AHEAD, SamplingBackend
from tinsmith.engines.base import Drawn, Files, Ticket
from tinsmith.protocol.errors import GateUnavailable, InputTokensExceeded, NotFound, ReasonCode, StateContention, TinsmithError
from tinsmith.protocol.futures import Outcome, SampledTokens
from tinsmith.protocol.inputs import ModelInput, TextChunk
from tinsmith.protocol.sampling import Sample, SampledSequence, SampleOutput, SamplingParams, StopReason
from tinsmith.queue.gate import TRANSFER_S, Gate
from tinsmith.queue.pool import Finished, Work
from tinsmith.state.inbox import StreamChunk

MAX_ROWS = 5


def work(rid: str, adapter: str | None = None, num_samples: int = 1, *, is_watched: bool = False) -> Work:
    prompt = ModelInput((TextChunk(array("i", [1]).tobytes()),))
    sample = Sample(prompt=prompt, params=SamplingParams(seed=0), num_samples=num_samples, adapter=adapter)
    return Work(rid, sample, is_watched, tenant="their-tenant")


class ScriptedEngine:
    """Finishes what `done` names; `poison` makes every step raise while that request is in; `hang` blocks the next step."""

    max_rows = MAX_ROWS

    def __init__(self) -> None:
        self.adapters: dict[str, Files] = {}
        self.requests: dict[Ticket, Sample] = {}
        self.scopes: list[str] = []
        self.done: set[str] = set()
        self.poison: str | None = None
        self.refusal: TinsmithError | None = None
        self.slots = 2
        self.hang: threading.Event | None = None
        self.threads: set[str] = set()
        self.step_sizes: list[int] = []
        self.watched: list[Ticket] = []
        self.news: list[Drawn] = []
        self.reports = 0

    @property
    def num_live(self) -> int:
        return len(self.requests)

    def has_adapter(self, key: str) -> bool:
        self.threads.add(threading.current_thread().name)
        return key in self.adapters

    def load_adapter(self, key: str, files: Files) -> None:
        if len(self.adapters) >= self.slots:
            idle = set(self.adapters) - {sample.adapter for sample in self.requests.values()}
            if not idle:
                raise StateContention("all slots are busy")
            del self.adapters[min(idle)]
        self.adapters[key] = files

    def add(self, ticket: Ticket, sample: Sample, scope: str = "") -> None:
        if self.refusal is not None:
            raise self.refusal
        assert ticket not in self.requests
        self.requests[ticket] = sample
        self.scopes.append(scope)

    def cancel(self, ticket: Ticket) -> None:
        self.requests.pop(ticket, None)

    def watch(self, ticket: Ticket) -> None:
        assert ticket in self.requests
        self.watched.append(ticket)

    def drawn(self) -> list[Drawn]:
        self.reports += 1
        news, self.news = self.news, []
        return news

    def step(self) -> list[tuple[Ticket, SampleOutput | TinsmithError]]:
        self.threads.add(threading.current_thread().name)
        self.step_sizes.append(len(self.requests))
        if self.hang is not None:
            hang, self.hang = self.hang, None
            hang.wait(10)
        names = {ticket.partition("#")[0]: ticket for ticket in self.requests}
        if self.poison in names:
            raise RuntimeError("a kernel failed")
        answers: list[tuple[Ticket, SampleOutput | TinsmithError]] = []
        for rid in sorted(self.done & names.keys()):
            del self.requests[names[rid]]
            answers.append((names[rid], SampleOutput([SampledSequence([7], [-1.0], StopReason.LENGTH)])))
        return answers

    def ping(self) -> None: ...


class Artifacts:
    """Files by artifact; `gate` holds reads back."""

    def __init__(self) -> None:
        self.reads: list[str] = []
        self.asked = asyncio.Event()
        self.gate = asyncio.Event()
        self.gate.set()

    async def read(self, artifact: str) -> Files:
        self.reads.append(artifact)
        self.asked.set()
        await self.gate.wait()
        if artifact == "gone":
            raise NotFound("checkpoint 'gone' is unknown")
        if artifact == "unreadable":
            raise OSError("input/output error")
        return {"adapter_config.json": artifact.encode()}


def encode(output: SampleOutput) -> bytes:
    return b"tokens:%d" % output.sequences[0].tokens[0]


@pytest.fixture
def engine() -> ScriptedEngine:
    return ScriptedEngine()


@pytest.fixture
async def artifacts() -> Artifacts:
    return Artifacts()


@pytest.fixture
async def make_backend(engine: ScriptedEngine, artifacts: Artifacts) -> Callable[[float], SamplingBackend]:
    def make(bound_s: float) -> SamplingBackend:
        gate = Gate(bound_s=bound_s, exclusive=False, ping=engine.ping)
        return SamplingBackend(engine, gate, artifacts.read, encode, base="base")

    return make


@pytest.fixture
async def backend(make_backend: Callable[[float], SamplingBackend]) -> SamplingBackend:
    return make_backend(30.0)


async def steps(backend: SamplingBackend, count: int = 1) -> dict[str, Outcome]:
    return dict([finished for _ in range(count) for finished in await backend.step()])


def reasons(finished: Sequence[Finished]) -> dict[str, ReasonCode | None]:
    return {rid: outcome.failure and outcome.failure.reason for rid, outcome in finished}


@pytest.mark.proves("R5", "R9")
async def test_samples_run_off_the_loop_and_their_answers_are_encoded(backend: SamplingBackend, engine: ScriptedEngine) -> None:
    assert backend.is_idle
    assert await backend.admit([work("a"), work("b")]) == []
    assert engine.scopes == ["their-tenant"] * 2, "what was computed of a prompt stays with its tenant"
    assert not backend.is_idle
    engine.done = {"a"}
    assert await steps(backend) == {"a": Outcome(result=b"tokens:7", sampled=SampledTokens(num_prompt=1, num_cached=0, num_drawn=1))}
    assert backend.room() == MAX_ROWS + QUEUE_AHEAD - 1
    engine.done = {"b"}
    assert await steps(backend) == {"b": Outcome(result=b"tokens:7", sampled=SampledTokens(num_prompt=1, num_cached=0, num_drawn=1))}
    assert backend.is_idle
    assert threading.current_thread().name not in engine.threads


async def test_an_adapter_is_fetched_once(backend: SamplingBackend, engine: ScriptedEngine, artifacts: Artifacts) -> None:
    await backend.admit([work("a", "x"), work("b", "x"), work("c", "y")])
    assert artifacts.reads == ["x", "y"]
    assert engine.adapters["x"] == {"adapter_config.json": b"x"}
    assert engine.num_live == 3


async def test_refusals_concern_their_own_request(backend: SamplingBackend, engine: ScriptedEngine) -> None:
    assert reasons(await backend.admit([work("gone", "gone"), work("unreadable", "unreadable"), work("good")])) == {
        "gone": ReasonCode.RESOURCE_NOT_FOUND,
        "unreadable": ReasonCode.INTERNAL_ERROR,
    }
    engine.refusal = InputTokensExceeded("too long")
    assert reasons(await backend.admit([work("long")])) == {"long": ReasonCode.INPUT_TOKENS_EXCEEDED}
    engine.done = {"good"}
    assert reasons(await backend.step()) == {"good": None}


async def test_a_slow_checkpoint_does_not_hold_up_what_runs(backend: SamplingBackend, engine: ScriptedEngine, artifacts: Artifacts) -> None:
    artifacts.gate.clear()
    admission = asyncio.create_task(backend.admit([work("slow", "x")]))
    await backend.admit([work("quick")])
    engine.done = {"quick", "slow"}
    assert (await steps(backend)).keys() == {"quick"}
    assert backend.is_idle, "a request whose adapter is on its way gives the engine nothing to do"
    assert backend.room() == MAX_ROWS + QUEUE_AHEAD - 1
    artifacts.gate.set()
    await admission
    assert (await steps(backend)).keys() == {"slow"}


async def test_a_request_waits_while_every_adapter_slot_is_in_use(backend: SamplingBackend, engine: ScriptedEngine) -> None:
    assert await backend.admit([work("a", "x"), work("b", "y"), work("c", "z")]) == []
    assert engine.num_live == 2
    engine.done = {"a"}
    assert (await steps(backend)).keys() == {"a"}
    engine.done = {"c"}
    assert (await steps(backend)).keys() == {"c"}
    assert "z" in engine.adapters


async def test_a_cancelled_request_leaves_the_engine_with_the_next_call(backend: SamplingBackend, engine: ScriptedEngine) -> None:
    await backend.admit([work("a"), work("b", "x"), work("c", "y"), work("parked", "z")])
    for rid in ("a", "parked", "unknown"):
        backend.cancel(rid)
    engine.done = {"a", "b", "c", "parked"}
    assert (await steps(backend)).keys() == {"b", "c"}
    assert engine.num_live == 0
    assert backend.is_idle


async def test_a_request_cancelled_on_its_way_in_does_not_stay(
    backend: SamplingBackend, engine: ScriptedEngine, artifacts: Artifacts
) -> None:
    artifacts.gate.clear()
    admission = asyncio.create_task(backend.admit([work("a", "x")]))
    await artifacts.asked.wait()
    backend.cancel("a")
    artifacts.gate.set()
    assert await admission == []
    await backend.admit([work("b")])
    await backend.step()
    assert [ticket.partition("#")[0] for ticket in engine.requests] == ["b"]


@pytest.mark.proves("R10")
async def test_a_step_that_raises_fails_only_the_request_that_makes_it_raise(backend: SamplingBackend, engine: ScriptedEngine) -> None:
    await backend.admit([work("good"), work("bad"), work("too")])
    engine.poison, engine.done = "bad", {"good", "too"}
    assert await backend.step() == []
    assert backend.room() == 0, "nothing joins while requests are tried one by one"
    assert await backend.admit([work("late")]) == []
    outcomes = await steps(backend, 3)
    assert outcomes["good"].result == outcomes["too"].result == b"tokens:7"
    failure = outcomes["bad"].failure
    assert failure is not None
    assert failure.reason is ReasonCode.INTERNAL_ERROR
    assert "a kernel failed" in (failure.diagnostic or "")
    assert engine.step_sizes == [3, 1, 1, 1]
    engine.done = {"late"}
    assert (await steps(backend)).keys() == {"late"}


async def test_a_suspect_can_be_cancelled(backend: SamplingBackend, engine: ScriptedEngine) -> None:
    await backend.admit([work("good"), work("bad")])
    engine.poison = "bad"
    await backend.step()
    backend.cancel("bad")
    engine.done = {"good"}
    assert (await steps(backend)).keys() == {"good"}
    assert backend.is_idle


@pytest.mark.proves("R7")
async def test_a_step_that_hangs_fails_its_requests_and_closes_the_backend_until_it_ends(
    make_backend: Callable[[float], SamplingBackend], engine: ScriptedEngine
) -> None:
    backend = make_backend(0.05)
    woken = asyncio.Event()
    backend.attach(woken.set)
    await backend.admit([work("a"), work("b", "x")])
    engine.hang = hang = threading.Event()
    assert reasons(await backend.step()) == {"a": ReasonCode.EXECUTION_TIMEOUT, "b": ReasonCode.EXECUTION_TIMEOUT}
    assert (backend.room(), backend.is_idle) == (0, True)
    assert await backend.admit([work("a again")]) == [], "what was on its way waits"
    hang.set()
    async with asyncio.timeout(5):
        await woken.wait()
    assert backend.room() == MAX_ROWS + QUEUE_AHEAD - 1
    engine.done = {"a", "a again"}
    assert (await steps(backend)).keys() == {"a again"}
    assert engine.num_live == 0, "the requests that were given up are gone"


async def test_an_admission_that_hangs_fails_with_what_runs(
    make_backend: Callable[[float], SamplingBackend], engine: ScriptedEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    backend = make_backend(0.05)
    await backend.admit([work("a")])
    hang = threading.Event()
    monkeypatch.setattr(engine, "add", lambda *_: hang.wait(10))
    assert reasons(await backend.admit([work("b")])) == {"a": ReasonCode.EXECUTION_TIMEOUT, "b": ReasonCode.EXECUTION_TIMEOUT}
    hang.set()


async def test_a_shut_gate_fails_the_requests_and_not_the_loop(engine: ScriptedEngine, artifacts: Artifacts) -> None:
    shut = False

    async def call_backend(call: Callable[..., object], /, *args: object, **kwargs: object) -> object:
        if shut:
            raise GateUnavailable("shut")
        return call(*args, **kwargs)

    backend = SamplingBackend(engine, call_backend, artifacts.read, encode, base="base")  # type: ignore[arg-type]
    await backend.admit([work("a")])
    shut = True
    assert reasons(await backend.step()) == {"a": ReasonCode.BACKEND_GATE_UNAVAILABLE}
    assert reasons(await backend.admit([work("b")])) == {"b": ReasonCode.BACKEND_GATE_UNAVAILABLE}


async def test_an_engines_own_error_answer_is_a_failed_outcome(
    backend: SamplingBackend, engine: ScriptedEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    await backend.admit([work("a")])
    ticket = next(iter(engine.requests))
    monkeypatch.setattr(engine, "step", lambda: [(ticket, NotFound("no")), ("unknown#9", NotFound("no"))])
    assert reasons(await backend.step()) == {"a": ReasonCode.RESOURCE_NOT_FOUND}


async def test_room_counts_sequences(backend: SamplingBackend) -> None:
    assert backend.room() == MAX_ROWS + QUEUE_AHEAD
    await backend.admit([work("pair", num_samples=2)])
    assert backend.room() == (MAX_ROWS + QUEUE_AHEAD - 2) // 2
    await backend.admit([work("single")])
    assert backend.room() == (MAX_ROWS + QUEUE_AHEAD - 3) // 2


@pytest.mark.proves("R68")
async def test_large_requests_do_not_shut_the_door_for_long(backend: SamplingBackend) -> None:
    for number in range(MAX_ROWS + QUEUE_AHEAD):
        await backend.admit([work(f"large{number}", num_samples=1000)])
    assert backend.room() == 0
    await steps(backend, PATIENCE_STEPS)
    assert backend.room() == 1
    await backend.admit([work("another tenant")])
    assert backend.room() == 0


@pytest.mark.proves("R3")
async def test_loading_an_adapter_has_its_declared_bound_and_everything_else_the_default(
    engine: ScriptedEngine, artifacts: Artifacts
) -> None:
    gate = Gate(bound_s=7, exclusive=False, ping=engine.ping)
    bounds: dict[str, float] = {}

    async def call_backend(call: Callable[..., object], /, *args: object, **kwargs: object) -> object:
        bounds[call.__name__] = gate.bound_of(call)
        return await gate(call, *args, **kwargs)

    backend = SamplingBackend(engine, call_backend, artifacts.read, encode, base="base")  # type: ignore[arg-type]
    await backend.admit([work("a", "x")])
    await backend.step()
    assert bounds == {"add_if_ready": 7, "load_adapter": TRANSFER_S, "add": 7, "step": 7}


@pytest.mark.proves("R3")
async def test_an_adapter_may_take_longer_than_the_default_bound(
    make_backend: Callable[[float], SamplingBackend], engine: ScriptedEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    load = engine.load_adapter

    def load_adapter(key: str, files: Files) -> None:
        threading.Event().wait(0.3)
        load(key, files)

    monkeypatch.setattr(engine, "load_adapter", load_adapter)
    backend = make_backend(0.1)
    assert await backend.admit([work("a", "x")]) == []
    engine.done = {"a"}
    assert reasons(await backend.step()) == {"a": None}


async def test_a_request_cancelled_before_its_turn_never_enters(
    backend: SamplingBackend, engine: ScriptedEngine, artifacts: Artifacts
) -> None:
    artifacts.gate.clear()
    admission = asyncio.create_task(backend.admit([work("slow", "x"), work("behind")]))
    await artifacts.asked.wait()
    backend.cancel("behind")
    artifacts.gate.set()
    await admission
    assert [ticket.partition("#")[0] for ticket in engine.requests] == ["slow"]


async def test_only_watched_requests_are_watched_in_the_engine_and_told(backend: SamplingBackend, engine: ScriptedEngine) -> None:
    await backend.admit([work("quiet")])
    await backend.step()
    assert (engine.watched, engine.reports) == ([], 0), "nobody watches: nothing is asked"
    await backend.admit([work("loud", is_watched=True)])
    (ticket,) = engine.watched
    engine.news = [Drawn(ticket, 1, 4, [7, 8], [-1.0, -2.0]), Drawn("another#9", 0, 0, [1], [-1.0])]
    await backend.step()
    assert backend.take_chunks() == [StreamChunk(rid="loud", sequence=1, offset=4, tokens=[7, 8], logprobs=[-1.0, -2.0])]
    assert backend.take_chunks() == []


async def test_a_request_that_ends_tells_no_more(backend: SamplingBackend, engine: ScriptedEngine) -> None:
    await backend.admit([work("a", is_watched=True)])
    (ticket,) = engine.watched
    engine.news, engine.done = [Drawn(ticket, 0, 0, [7], [-1.0])], {"a"}
    assert reasons(await backend.step()) == {"a": None}
    assert backend.take_chunks() == []


async def test_a_watched_request_that_runs_again_is_watched_again(backend: SamplingBackend, engine: ScriptedEngine) -> None:
    await backend.admit([work("good", is_watched=True), work("bad")])
    engine.poison = "bad"
    await backend.step()
    engine.poison = None
    await backend.step()
    assert [ticket.partition("#")[0] for ticket in engine.watched] == ["good", "good"]


async def test_tokens_of_completed_samples_are_counted(backend: SamplingBackend, engine: ScriptedEngine) -> None:
    measured: list[telemetry.Measurement] = []
    with telemetry.recording(measured.append):
        await backend.admit([work("a"), work("b")])
        await backend.step()
        engine.done = {"a", "b"}
        await backend.step()
    counted = {one.labels["kind"]: one.value for one in measured if one.name == telemetry.TOKENS}
    assert counted == {"sampled": 2, "prompt": 2}
