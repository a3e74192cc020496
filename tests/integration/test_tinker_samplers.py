"""The stock SDK's sampling clients against the gateway: the session poller, clones, cancelling, holding back, inflight weights."""

import contextlib
import pickle  # noqa: TID251 - how the SDK's clients travel to other processes
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import tinker
from tinker import types

from tests.fakes.in_process import BASE, INFO, Cast, InProcessServer, serve
from tests.integration.test_tinker_sdk import DATA, PROMPT, trainer
from tests.sdk_process import has_succeeded
from tinsmith.gateway import bodies
from tinsmith.gateway.tinker.futures import METADATA_BYTES
from tinsmith.lifecycle.sessions import end_session
from tinsmith.protocol.errors import QuotaExceeded
from tinsmith.protocol.futures import State
from tinsmith.state.feeds import CLIENT_SPAN, Completion, FeedPage
from tinsmith.state.lanes import PoolSubmission, Submitted

RESULT_S = 30
NUM_CLONES = 64

# The SDK leaves connections open when its clients are closed; whoever is collecting garbage then hears of it.
pytestmark = pytest.mark.filterwarnings("ignore:unclosed:ResourceWarning")


@contextlib.contextmanager
def served(root: Path, *, num_samplers: int = 1, **gateway: object) -> Iterator[tuple[InProcessServer, tinker.ServiceClient]]:
    with serve(root, Cast(num_samplers=num_samplers), gateway=gateway) as server:
        client = tinker.ServiceClient(base_url=server.url, api_key="tml-test")
        yield server, client
        client.close("success").result()


@pytest.fixture(scope="module", params=[True, False], ids=["poller", "no poller"])
def each(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[tuple[InProcessServer, tinker.ServiceClient]]:
    """A server and a client, with the session poller and without."""
    with served(tmp_path_factory.mktemp("artifacts"), session_poller=request.param) as running:
        yield running


def sampler_of(client: tinker.ServiceClient) -> tinker.SamplingClient:
    return client.create_sampling_client(base_model=BASE).result(RESULT_S)


def params(seed: int = 1) -> types.SamplingParams:
    return types.SamplingParams(max_tokens=4, seed=seed)


def tokens_of(sampler: tinker.SamplingClient, seed: int = 1) -> list[int]:
    answer = sampler.sample(PROMPT, num_samples=1, sampling_params=params(seed)).result(RESULT_S)
    return list(answer.sequences[0].tokens)


class Submits:
    """Hears what the server's lanes are given, and refuses the first so many."""

    def __init__(self, server: InProcessServer, monkeypatch: pytest.MonkeyPatch, *, num_refused: int = 0) -> None:
        self.keys: list[str] = []
        self._submit = server.services.lanes.pool_submit
        self._num_refused = num_refused
        monkeypatch.setattr(server.services.lanes, "pool_submit", self)

    async def __call__(self, submission: PoolSubmission) -> Submitted:
        self.keys.append(submission.key)
        if len(self.keys) <= self._num_refused:
            raise QuotaExceeded("too many are waiting")
        return await self._submit(submission)

    @property
    def seq_ids(self) -> list[int]:
        return [int(key.rpartition("/")[2]) for key in self.keys]


# With the poller and without


def test_many_samples_at_once(each: tuple[InProcessServer, tinker.ServiceClient]):
    sampler = sampler_of(each[1])
    futures = [sampler.sample(PROMPT, num_samples=2, sampling_params=params(seed)) for seed in range(100)]
    answers = [future.result(RESULT_S) for future in futures]
    assert [[len(sequence.tokens) for sequence in answer.sequences] for answer in answers] == [[4, 4]] * 100
    assert answers[7].sequences[0].tokens == tokens_of(sampler, 7)


def test_clones_in_other_processes(each: tuple[InProcessServer, tinker.ServiceClient], tmp_path: Path):
    sampler = sampler_of(each[1])
    (tmp_path / "sampler").write_bytes(pickle.dumps(sampler))
    script = """
import pickle, sys
from pathlib import Path
from typing import Any
import tinker
from tinker import types
path, handle = sys.argv[1:]
clones = [pickle.loads(Path(path).read_bytes()), tinker.SamplingClient.from_sampler_handle(handle, api_key="tml-test")]
for clone in clones:
    future = clone.sample(types.ModelInput.from_ints(PROMPT), num_samples=1, sampling_params=types.SamplingParams(max_tokens=4, seed=1))
    print(*future.result(30).sequences[0].tokens)
"""
    script = script.replace("PROMPT", repr(PROMPT.to_ints()))
    ran = subprocess.run(
        [sys.executable, "-c", script, str(tmp_path / "sampler"), sampler.get_sampler_handle()],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert has_succeeded(ran), ran.stderr
    assert [[int(token) for token in line.split()] for line in ran.stdout.splitlines()] == [tokens_of(sampler)] * 2


def test_many_clones_have_seq_ids_and_completions_of_their_own(
    each: tuple[InProcessServer, tinker.ServiceClient], monkeypatch: pytest.MonkeyPatch
):
    server, client = each
    sampler = sampler_of(client)
    submits = Submits(server, monkeypatch)
    clones = [pickle.loads(pickle.dumps(sampler)) for _ in range(NUM_CLONES)]  # noqa: S301 - our own
    futures = [clone.sample(PROMPT, num_samples=1, sampling_params=params()) for clone in clones for _ in range(2)]
    assert {tuple(future.result(RESULT_S).sequences[0].tokens) for future in futures} == {tuple(tokens_of(sampler))}
    own = [seq_id for seq_id in submits.seq_ids if seq_id >= CLIENT_SPAN]
    assert sorted(own) == [number * CLIENT_SPAN + index for number in range(1, NUM_CLONES + 1) for index in (0, 1)]


def test_a_large_result_is_fetched_whole(each: tuple[InProcessServer, tinker.ServiceClient]):
    sampler = sampler_of(each[1])
    k = 2 * METADATA_BYTES // (8 * INFO.max_context)
    prompt = types.ModelInput.from_ints([1] * (INFO.max_context - 1))
    answer = sampler.sample(
        prompt, num_samples=1, sampling_params=types.SamplingParams(max_tokens=1), include_prompt_logprobs=True, topk_prompt_logprobs=k
    ).result(RESULT_S)
    assert answer.topk_prompt_logprobs is not None
    assert len(answer.topk_prompt_logprobs) == INFO.max_context - 1


def test_a_refused_sample_leaves_the_client_as_it_was(each: tuple[InProcessServer, tinker.ServiceClient]):
    sampler = sampler_of(each[1])
    with pytest.raises(tinker.UnprocessableEntityError):
        sampler.compute_logprobs(types.ModelInput.from_ints([1] * (INFO.max_context + 1))).result(RESULT_S)
    assert tokens_of(sampler) == tokens_of(sampler)


def test_a_client_that_is_told_to_hold_back_sends_the_same_seq_id_again(
    each: tuple[InProcessServer, tinker.ServiceClient], monkeypatch: pytest.MonkeyPatch
):
    server, client = each
    sampler = sampler_of(client)
    expected = tokens_of(sampler)
    submits = Submits(server, monkeypatch, num_refused=3)
    started = time.monotonic()
    assert tokens_of(sampler) == expected
    assert time.monotonic() - started >= 3
    assert submits.seq_ids == [1] * 4


def test_inflight_samplers_move_and_snapshots_stay(each: tuple[InProcessServer, tinker.ServiceClient]):
    client = trainer(each[1])

    def step() -> None:
        client.forward_backward(DATA, "cross_entropy")
        client.optim_step(types.AdamParams(learning_rate=0.5)).result(RESULT_S)

    def logprobs(sampler: tinker.SamplingClient) -> list[float | None]:
        return sampler.compute_logprobs(PROMPT).result(RESULT_S)

    step()
    snapshot = client.save_weights_and_get_sampling_client().result(RESULT_S)
    first = client.save_weights_and_get_sampling_client(kind="inflight").result(RESULT_S)
    clone = pickle.loads(pickle.dumps(first))  # noqa: S301 - our own
    before = logprobs(snapshot)
    assert logprobs(first) == logprobs(clone) == before
    step()
    assert logprobs(first) == before, "a step alone moves nothing"
    second = client.save_weights_and_get_sampling_client(kind="inflight").result(RESULT_S)
    after = logprobs(second)
    assert after != before
    assert logprobs(first) == logprobs(clone) == after
    assert logprobs(snapshot) == before


# The poller, in particular


def test_a_cancelled_sample_is_dropped_and_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    told: list[Completion] = []
    with served(tmp_path, num_samplers=0) as (server, client):
        completions = server.services.lanes.completions

        async def heard(*args: Any) -> FeedPage:
            page = await completions(*args)
            told.extend(page.completions)
            return page

        monkeypatch.setattr(server.services.lanes, "completions", heard)
        sampler = sampler_of(client)
        dropped, kept = (sampler.sample(PROMPT, num_samples=1, sampling_params=params()).future() for _ in range(2))
        wait_until(lambda: num_waiting(server) == 2)
        dropped.cancel()
        wait_until(lambda: len(told) == 1)
        assert (told[0].result_size, num_waiting(server), kept.done()) == (None, 1, False)
        record = server.call(server.services.lanes.look("local", told[0].rid))
        assert record.state is State.CANCELLED
        kept.cancel()
        wait_until(lambda: num_waiting(server) == 0)


@pytest.mark.proves("R67")
def test_nobody_waits_on_after_the_end_of_the_session(tmp_path: Path):
    with served(tmp_path, num_samplers=0) as (server, client):
        sampler = sampler_of(client)
        futures = [sampler.sample(PROMPT, num_samples=1, sampling_params=params()) for _ in range(5)]
        wait_until(lambda: num_waiting(server) == 5)
        session_id = sampler._sampling_session_id.partition(":")[0]
        services = server.services
        server.call(end_session(services.catalog, services.lanes, "local", session_id, reason="expired", now_ms=1))
        for future in futures:
            with pytest.raises((ValueError, tinker.TinkerError)):
                future.result(RESULT_S)


def num_waiting(server: InProcessServer) -> int:
    infos = server.call(server.services.lanes.queues(BASE))
    return sum(info.num_pending for info in infos)


def wait_until(is_so: Callable[[], bool]) -> None:
    deadline = time.monotonic() + RESULT_S
    while not is_so():
        assert time.monotonic() < deadline
        time.sleep(0.02)


@pytest.mark.parametrize("is_on", [True, False])
def test_uploads_are_compressed_where_the_server_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_on: bool):
    encodings: list[str] = []
    with served(tmp_path, compress_uploads=is_on) as (_, client):
        receive = bodies.receive

        async def heard(request: object) -> bodies.Received:
            received = await receive(request)  # type: ignore[arg-type]
            encodings.append(received.encoding)
            return received

        model = trainer(client)
        monkeypatch.setattr(bodies, "receive", heard)
        assert model.forward(DATA, "cross_entropy").result(RESULT_S).metrics["loss:sum"] > 0
    assert ("zstd" in encodings) is is_on
