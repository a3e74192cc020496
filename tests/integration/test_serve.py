"""The whole server with fake engines, started once: ready, sockets, deaths of replicas, and, in the last test, its end."""

import re
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import grpc
import httpx
import psutil
import pytest
import tinker
import yaml
from tinker import types

from tests.server_process import ServerProcess

CONFIGS = Path(__file__).resolve().parents[2] / "configs"
MODEL = "HuggingFaceTB/SmolLM2-135M-Instruct"
METRICS_SCRIPTS = ("monitor.py", "dashboard.py")  # of Ray; their ports ask for no token, and `tinsmith check` says so
RESTART_S = 30.0
# One call of each kind of Ray's services; a port of Ray knows at least one of them.
RAY_CALLS = (
    "/ray.rpc.NodeInfoGcsService/GetAllNodeInfo",
    "/ray.rpc.NodeManagerService/GetNodeStats",
    "/ray.rpc.ObjectManagerService/Push",
    "/ray.rpc.CoreWorkerService/GetCoreWorkerStats",
    "/ray.rpc.ReporterService/GetTraceback",
    "/ray.serve.ASGIService/HandleRequest",
)

# The SDK leaves connections open when its clients are closed; whoever is collecting garbage then hears of it.
pytestmark = pytest.mark.filterwarnings("ignore:unclosed:ResourceWarning")


@pytest.fixture(scope="session")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    config = yaml.safe_load((CONFIGS / "fake.yaml").read_text())
    config["checkpoints"] = {"dir": str(tmp_path_factory.mktemp("checkpoints"))}
    with ServerProcess.start(config) as server:
        yield server


@pytest.fixture
def service(server: ServerProcess) -> Iterator[tinker.ServiceClient]:
    client = tinker.ServiceClient(base_url=server.url, api_key="tml-local")
    yield client
    client.close("success").result()


def datum(token: int) -> types.Datum:
    return types.Datum(
        model_input=types.ModelInput.from_ints([1, 2, 3]),
        loss_fn_inputs={"target_tokens": [2, 3, token], "weights": [1.0, 1.0, 1.0]},  # type: ignore[dict-item]
    )


def step(model: tinker.TrainingClient, token: int) -> float:
    """One training step; answers its loss."""
    backward = model.forward_backward([datum(token)], "cross_entropy")
    optim = model.optim_step(types.AdamParams(learning_rate=0.1))
    loss = backward.result().metrics["loss:sum"]
    assert "unclipped_grad_l2:mean" in (optim.result().metrics or {})
    return loss


def created(service: tinker.ServiceClient) -> tinker.TrainingClient:
    return service.create_lora_training_client(MODEL, rank=4, seed=7).result()


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
    return port


def wait_for_new_replica(server: ServerProcess, role: str, count: int, dead: int) -> None:
    deadline = time.monotonic() + RESTART_S
    while True:
        pids = server.pids(role)
        if dead not in pids and len(pids) >= count:
            return
        assert time.monotonic() < deadline, f"no new {role}: {server.log[-4000:]}"
        time.sleep(0.2)


def test_standard_output_carries_the_ready_line_alone(server: ServerProcess) -> None:
    assert server.stdout_lines == [f"ready {server.url}"]
    assert httpx.get(f"{server.url}/api/v1/healthz").json() == {"status": "ok"}
    assert re.search(r"start: ray [\d.]+ s, serve [\d.]+ s, models [\d.]+ s .*, deployments [\d.]+ s, total [\d.]+ s", server.log)
    assert server.log.count("does not survive a restart") == 1


def test_there_is_one_replica_of_each_role_and_two_gateways(server: ServerProcess) -> None:
    assert {role: len(server.pids(role)) for role in ("gateway", "trainer", "sampler")} == {"gateway": 2, "trainer": 1, "sampler": 1}
    wait_for_new_replica(server, "janitor", count=1, dead=0)  # it starts when the server is ready


def test_the_stock_sdk_trains_and_samples(service: tinker.ServiceClient) -> None:
    model = created(service)
    losses = [step(model, 4) for _ in range(3)]
    assert losses == sorted(losses, reverse=True)
    assert losses[0] > losses[-1]
    sampler = model.save_weights_and_get_sampling_client().result()
    params = types.SamplingParams(max_tokens=5, seed=3, temperature=1.0)
    prompt = types.ModelInput.from_ints([1, 2, 3])
    first, second = (sampler.sample(prompt, num_samples=2, sampling_params=params).result() for _ in range(2))
    assert [sequence.tokens for sequence in first.sequences] == [sequence.tokens for sequence in second.sequences]
    assert all(len(sequence.tokens) == 5 for sequence in first.sequences)


def test_no_worker_of_fake_engines_has_imported_pytorch(server: ServerProcess) -> None:
    for role in ("gateway", "trainer", "sampler", "janitor"):
        for pid in server.pids(role):
            loaded = {Path(region.path).name for region in psutil.Process(pid).memory_maps()}
            assert not any(name.startswith("libtorch") for name in loaded), role


@pytest.mark.proves("S6")
def test_sockets_are_ours_only_where_configured_and_rays_ask_for_the_token(server: ServerProcess) -> None:
    configured = int(server.url.rsplit(":", 1)[1])
    gateways = set(server.pids("gateway"))
    ours: set[int] = set()
    open_to_all: list[str] = []
    for process in [psutil.Process(server.process.pid), *server.descendants]:
        for address in {tuple(entry.laddr) for entry in process.net_connections("tcp") if entry.status == psutil.CONN_LISTEN}:
            if address == ("127.0.0.1", configured):
                ours.add(process.pid)
            elif not is_guarded(*address):
                open_to_all.append(" ".join(process.cmdline()))
    assert ours == gateways
    assert [line for line in open_to_all if not any(script in line for script in METRICS_SCRIPTS)] == []


def is_guarded(ip: str, port: int) -> bool:
    """Whether a caller without the token is refused there, in the protocol that the port speaks."""
    host = "127.0.0.1" if ip in ("::", "0.0.0.0") else ip  # noqa: S104
    with grpc.insecure_channel(f"{host}:{port}") as channel:
        answers = {answer_of(channel, call) for call in RAY_CALLS}
    if answers != {grpc.StatusCode.UNAVAILABLE}:
        return grpc.StatusCode.UNAUTHENTICATED in answers and answers <= {grpc.StatusCode.UNAUTHENTICATED, grpc.StatusCode.UNIMPLEMENTED}
    return httpx.get(f"http://{host}:{port}/", trust_env=False).status_code == httpx.codes.UNAUTHORIZED


def answer_of(channel: grpc.Channel, call: str) -> grpc.StatusCode:
    try:
        channel.unary_unary(call)(b"", timeout=5)
    except grpc.RpcError as error:
        code: grpc.StatusCode = error.code()
        return code
    return grpc.StatusCode.OK


def test_a_killed_gateway_costs_its_callers_nothing(server: ServerProcess, service: tinker.ServiceClient) -> None:
    model = created(service)
    before = step(model, 5)
    dead = server.kill("gateway")
    after = [step(model, 5) for _ in range(5)]
    assert [before, *after] == sorted([before, *after], reverse=True)
    wait_for_new_replica(server, "gateway", 2, dead)


@pytest.mark.proves("I2", "R53")
def test_a_killed_trainer_costs_time_and_no_work(server: ServerProcess, service: tinker.ServiceClient) -> None:
    undisturbed = [step(created(service), 6)]
    model = created(service)
    reference = created(service)
    expected = [step(reference, 6) for _ in range(6)]
    losses = [step(model, 6) for _ in range(3)]
    dead = server.kill("trainer")
    losses += [step(model, 6) for _ in range(3)]
    assert losses == expected
    assert losses[:1] == undisturbed
    wait_for_new_replica(server, "trainer", 1, dead)


def test_a_killed_sampler_answers_after_its_restart(server: ServerProcess, service: tinker.ServiceClient) -> None:
    sampler = service.create_sampling_client(base_model=MODEL).result()
    params = types.SamplingParams(max_tokens=4, seed=1)
    prompt = types.ModelInput.from_ints([5, 6])
    before = sampler.sample(prompt, num_samples=1, sampling_params=params).result()
    dead = server.kill("sampler")
    after = sampler.sample(prompt, num_samples=1, sampling_params=params).result()
    assert [sequence.tokens for sequence in after.sequences] == [sequence.tokens for sequence in before.sequences]
    wait_for_new_replica(server, "sampler", 1, dead)


def test_a_taken_port_is_refused_before_anything_starts(server: ServerProcess) -> None:
    port = server.url.rsplit(":", 1)[1]
    began = time.monotonic()
    second = subprocess.run(
        [sys.executable, "-m", "tinsmith.cli", "serve", str(CONFIGS / "fake.yaml"), "--port", port],
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert second.returncode == 2
    assert second.stdout == ""
    assert f"gateway.port: 127.0.0.1:{port} is taken by another process" in second.stderr
    assert time.monotonic() - began < 30
    assert httpx.get(f"{server.url}/api/v1/healthz").status_code == httpx.codes.OK


def test_a_second_server_behind_serves_proxy_answers_alike(server: ServerProcess, service: tinker.ServiceClient, tmp_path: Path) -> None:
    """Two servers of one machine, each with a cluster of its own; `ingress: serve` is the same app."""
    config = yaml.safe_load((CONFIGS / "fake.yaml").read_text())
    config |= {"checkpoints": {"dir": str(tmp_path)}, "gateway": {"ingress": "serve", "port": free_port()}}
    direct = created(service)
    with ServerProcess.start(config) as proxied:
        assert proxied.url != server.url
        other = tinker.ServiceClient(base_url=proxied.url, api_key="tml-local")
        behind = created(other)
        assert [step(behind, token) for token in (4, 5, 6)] == [step(direct, token) for token in (4, 5, 6)]
        other.close("success").result()
        assert proxied.stop() == 0


def test_a_signal_ends_everything_within_its_bound(server: ServerProcess) -> None:
    everybody = server.descendants
    began = time.monotonic()
    assert server.stop() == 0
    assert time.monotonic() - began < 10
    assert [process for process in everybody if process.is_running() and process.status() != psutil.STATUS_ZOMBIE] == []
    assert server.stdout_lines == [f"ready {server.url}"]
    with pytest.raises(httpx.ConnectError):
        httpx.get(f"{server.url}/api/v1/healthz")
