"""Thousands of samples at once through the stock SDK: every one is answered, and the server is left without a connection."""

import resource
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
import tinker
from tinker import types

from tests.collecting import collect_quietly
from tests.fakes.in_process import BASE, serve

pytestmark = pytest.mark.filterwarnings("ignore:unclosed:ResourceWarning")  # connections that the SDK leaves to the collector

NUM_SAMPLES = 2_000
ALL_S = 240.0  # for all of them; 20 s on two free cores, client and server in one process
CLOSED_S = 30.0
DESCRIPTORS = 8_192  # without the poller the SDK holds a connection a sample, and here both ends of it are ours


@pytest.fixture(autouse=True)
def descriptors() -> Iterator[None]:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard if soft == hard else min(hard, max(soft, DESCRIPTORS)), hard))
    yield
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


@pytest.mark.timeout(600)
@pytest.mark.parametrize("with_poller", [True, False], ids=["poller", "no poller"])
def test_thousands_of_samples_are_all_answered(tmp_path: Path, with_poller: bool) -> None:
    with serve(tmp_path, gateway={"session_poller": with_poller}, limits={"max_pending": 10 * NUM_SAMPLES}) as server:
        port = int(server.url.rpartition(":")[2])
        service = tinker.ServiceClient(base_url=server.url, api_key="tml-any")
        sampler = service.create_sampling_client(base_model=BASE).result(ALL_S)
        give_up_at = time.monotonic() + ALL_S
        prompt = types.ModelInput.from_ints([1, 2, 3])
        waiting = [sampler.sample(prompt, 1, types.SamplingParams(max_tokens=2, seed=seed)) for seed in range(NUM_SAMPLES)]
        lengths = [len(future.result(timeout=give_up_at - time.monotonic()).sequences[0].tokens) for future in waiting]
        assert lengths == [2] * NUM_SAMPLES
        service.holder.close()
        del service, sampler, waiting
        collect_quietly()
        closed(port)


def closed(port: int) -> None:
    """Return when no connection of the server's is open any more, those counted that its peer has left and it has not."""
    give_up_at = time.monotonic() + CLOSED_S
    while still := [one for one in psutil.Process().net_connections("tcp") if one.laddr and one.laddr.port == port and one.raddr]:
        assert time.monotonic() < give_up_at, f"{len(still)} connections are still open"
        time.sleep(0.1)
