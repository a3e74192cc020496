"""The images as their Dockerfile describes them: no engine builds them here, so what can be read is checked."""

import fnmatch
from pathlib import Path

import pytest

from tests.unit.deploy.dockerfile import Stage, read_stages
from tinsmith.config import GatewayConfig, load

ROOT = Path(__file__).resolve().parents[3]
PORT = str(GatewayConfig().port)


@pytest.fixture(scope="module")
def stages() -> dict[str, Stage]:
    return read_stages(ROOT / "deploy" / "Dockerfile")


def sources(stage: Stage) -> list[str]:
    return [source for copy in stage.all("COPY") if "from" not in copy.flags for source in copy.words[:-1]]


def test_what_is_copied_exists_and_the_build_may_see_it(stages: dict[str, Stage]) -> None:
    visible = [line[1:] for line in (ROOT / ".dockerignore").read_text().splitlines() if line.startswith("!")]
    copied = [source for stage in stages.values() for source in sources(stage)]
    assert {"pyproject.toml", "constraints.txt", "src"} <= set(copied)
    assert [source for source in copied if not (ROOT / source).exists()] == []
    assert sorted(visible) == sorted(copied)
    assert not [pattern for pattern in visible if fnmatch.fnmatch("secrets.env", pattern)]


def test_files_come_from_stages_that_exist(stages: dict[str, Stage]) -> None:
    named = [copy.flags["from"] for stage in stages.values() for copy in stage.all("COPY") if "from" in copy.flags]
    assert named == ["build"]
    assert set(named) <= set(stages)


def test_the_pinned_environment_is_installed(stages: dict[str, Stage]) -> None:
    [install] = [run for run in stages["build"].all("RUN") if "pip install" in run.text]
    assert "-c constraints.txt" in install.text
    assert ".[server]" in install.words


@pytest.mark.parametrize("name", ["server", "door"])
def test_nothing_runs_as_root(stages: dict[str, Stage], name: str) -> None:
    instructions = stages[name].instructions
    user = stages[name].last("USER")
    assert user.words[0] != "root"
    assert any("useradd --uid 1000" in run.text and user.words[0] in run.words for run in stages[name].all("RUN"))
    assert not [after for after in instructions[instructions.index(user) :] if after.name == "RUN"]


def test_the_server_listens_is_probed_and_let_in_at_the_configured_port(stages: dict[str, Stage]) -> None:
    server, door = stages["server"], stages["door"]
    assert server.last("EXPOSE").words == (PORT,)
    probe = server.last("HEALTHCHECK")
    assert f"http://127.0.0.1:{PORT}/healthz'" in probe.words[-1]
    compile(probe.words[-1], "probe", "exec")
    listens, forwards = door.last("CMD").words
    assert listens.startswith(f"TCP-LISTEN:{door.last('EXPOSE').words[0]},fork")
    assert forwards == f"TCP:127.0.0.1:{PORT}"


def test_the_image_serves_a_configuration_that_is_sound(stages: dict[str, Stage]) -> None:
    server = stages["server"]
    command, path = server.last("CMD").words
    assert (server.last("ENTRYPOINT").words, command) == (("tinsmith",), "serve")
    [copied] = [copy.words[0] for copy in server.all("COPY") if copy.words[-1] == path]
    config = load(ROOT / copied)
    assert str(config.gateway.port) == PORT
    volumes = server.last("VOLUME").words
    assert str(config.checkpoints.dir) in volumes
    assert f"TINSMITH_CACHE={volumes[1]}" in server.last("ENV").text
    made = next(run for run in server.all("RUN") if "install --directory" in run.text)
    assert set(volumes) <= set(made.words)
