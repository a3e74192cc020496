"""The stock SDK against a server with keys: the key itself, tokens in its place, and what becomes of both."""

from collections.abc import Iterator
from pathlib import Path

import jwt
import pytest
import tinker
from click.testing import CliRunner
from tinker.cli.__main__ import main_cli
from tinker.lib.internal_client_holder import InternalClientHolder, sessionless_holder_cache

from tests.fakes.in_process import BASE, InProcessServer, serve
from tests.fakes.key_holders import with_keys
from tinsmith.gateway import recent
from tinsmith.gateway.tokens import PURPOSE
from tinsmith.state.keyring import KeyRecord, issue

RESULT_S = 30

# The SDK leaves connections open when its clients are closed; whoever is collecting garbage then hears of it.
pytestmark = pytest.mark.filterwarnings("ignore:unclosed:ResourceWarning")


@pytest.fixture(scope="module", params=[True, False], ids=["jwt", "key"])
def server(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[InProcessServer]:
    directory = tmp_path_factory.mktemp("keys")
    with serve(directory, auth=with_keys(directory, jwt=request.param)) as running:
        yield running


@pytest.fixture(autouse=True)
def own_connections(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The SDK shares the connections of REST clients for the life of the process, with what it learned of the server."""
    holders: dict[object, InternalClientHolder] = {}
    monkeypatch.setattr(sessionless_holder_cache, "_holders", holders)
    yield
    for holder in holders.values():
        holder.close()


@pytest.fixture
def forgetful(monkeypatch: pytest.MonkeyPatch) -> None:
    """The gateway remembers nothing of a key."""
    monkeypatch.setattr(recent, "KEPT_S", 0.0)


def new_key(server: InProcessServer) -> tuple[str, KeyRecord]:
    issued: tuple[str, KeyRecord] = server.call(issue(server.services.keyring, "acme", "sdk", 0))
    return issued


def revoke(server: InProcessServer, record: KeyRecord) -> None:
    server.call(server.services.keyring.revoke(record.key_id, 1))


def has_tokens(server: InProcessServer) -> bool:
    return server.services.tokens is not None


def rest(server: InProcessServer, key: str) -> tinker.RestClient:
    return tinker.RestClient(base_url=server.url, api_key=key)


def test_a_key_trains_and_samples(server: InProcessServer) -> None:
    key, _ = new_key(server)
    client = tinker.ServiceClient(base_url=server.url, api_key=key)
    trainer = client.create_lora_training_client(BASE, rank=8).result(RESULT_S)
    trainer.optim_step(tinker.types.AdamParams()).result(RESULT_S)
    sampler = trainer.save_weights_and_get_sampling_client().result(RESULT_S)
    prompt = tinker.types.ModelInput.from_ints([1, 2, 3])
    sampled = sampler.sample(prompt, 1, tinker.types.SamplingParams(max_tokens=3)).result(RESULT_S)
    assert len(sampled.sequences[0].tokens) == 3
    client.close("success").result()
    assert trainer.model_id in {model.model_id for model in server.call(server.services.catalog.models("acme"))}


def test_whoami_needs_a_token(server: InProcessServer) -> None:
    key, record = new_key(server)
    client = rest(server, key)
    if has_tokens(server):
        identity = client.whoami().result(RESULT_S)
        assert (identity.user_urn, identity.org_urn) == (f"urn:tinsmith:key:{record.key_id}", "tml:organization:acme")
        assert identity.email is None
    else:
        with pytest.raises(RuntimeError, match="JWT"):
            client.whoami().result(RESULT_S)


def test_a_revoked_key_is_refused_at_once(server: InProcessServer, forgetful: None) -> None:
    key, record = new_key(server)
    client = rest(server, key)
    client.get_server_capabilities().result(RESULT_S)
    revoke(server, record)
    with pytest.raises(tinker.AuthenticationError):
        client.get_server_capabilities().result(RESULT_S)
    with pytest.raises(tinker.AuthenticationError):
        tinker.ServiceClient(base_url=server.url, api_key=key).create_lora_training_client(BASE, rank=8).result(RESULT_S)


def test_a_token_that_no_signing_key_knows_is_exchanged_and_the_request_replayed(server: InProcessServer, forgetful: None) -> None:
    if not has_tokens(server):
        return
    key, _ = new_key(server)
    client = rest(server, key)
    client.get_server_capabilities().result(RESULT_S)
    before = client.holder._default_auth._token
    server.call(server.services.store.delete("system/signing_keys", PURPOSE))
    client.get_server_capabilities().result(RESULT_S)
    after = client.holder._default_auth._token
    assert jwt.get_unverified_header(before)["kid"] != jwt.get_unverified_header(after)["kid"]


def test_a_token_serves_as_the_key_of_a_client(server: InProcessServer) -> None:
    if not has_tokens(server):
        return
    _, record = new_key(server)
    client = rest(server, server.call(server.services.tokens.issue(record)))
    assert client.whoami().result(RESULT_S).org_urn == "tml:organization:acme"


def test_a_key_of_another_form_is_refused_by_the_client_itself(server: InProcessServer) -> None:
    with pytest.raises(tinker.TinkerError, match="tml-"):
        tinker.RestClient(base_url=server.url, api_key="sk-something")


def test_the_commands_of_the_account(server: InProcessServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    key, record = new_key(server)
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("TINKER_BASE_URL", server.url)
    monkeypatch.delenv("TINKER_API_KEY", raising=False)
    runner = CliRunner()
    logged_in = runner.invoke(main_cli, ["auth", "login"], input=f"{key}\n")
    assert (logged_in.exit_code, "(acme)" in logged_in.output) == (0, True), logged_in.output
    assert "Tinker accessible: yes" in runner.invoke(main_cli, ["auth", "status"]).output
    shown = runner.invoke(main_cli, ["auth", "whoami"])
    assert (shown.exit_code == 0) == has_tokens(server)
    assert (record.key_id in shown.output) == has_tokens(server)
