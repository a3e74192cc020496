"""The compatibility list, by its command, against a server with fake engines: everything that needs no server process of its own."""

import json
from collections.abc import Iterator

import pytest

from tests.fakes.in_process import InProcessServer, serve
from tests.fakes.key_holders import with_keys
from tinsmith import cli
from tinsmith.conformance import runner
from tinsmith.state.keyring import issue

# A process that the run starts; and of the engines a tokenizer and uploaded losses, which fakes have none of.
NEEDS_MORE = {"2b", "6d", "10g", "19", "20", "27b"}
LOAD = "26a"  # keeps two cores busy for a minute; `make compat` runs it


@pytest.fixture
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[InProcessServer]:
    directory = tmp_path_factory.mktemp("conformance")
    with serve(directory, auth=with_keys(directory), execution={"long_poll_s": 5}) as running:
        yield running


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_every_item_that_needs_no_process_of_the_server_passes(
    server: InProcessServer, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setenv("TINKER_TELEMETRY", "0")
    key, _ = server.call(issue(server.services.keyring, "acme", "list", 0))
    revoked, record = server.call(issue(server.services.keyring, "acme", "revoked", 0))
    server.call(server.services.keyring.revoke(record.key_id, 1))
    numbers = [held.number for held in runner.ITEMS if held.number != LOAD]
    words = ["--base-url", server.url, "--api-key", key, "--revoked-key", revoked, "--only", *numbers]
    code = cli.main(["conformance", *words, "--json"])
    verdicts = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [verdict for verdict in verdicts if verdict["outcome"] == "failed"] == []
    assert {verdict["number"] for verdict in verdicts if verdict["outcome"] == "not run"} == NEEDS_MORE
    assert code == 0
