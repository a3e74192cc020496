"""A server with keys: who is let in, as whom, what a refusal tells and costs, and tokens in the place of keys."""

from collections.abc import AsyncIterator, Callable
from pathlib import Path

import jwt
import pytest

from tests.fakes.face import BASE, NATIVE_PREFIX, Face, open_face
from tests.fakes.key_holders import client_of, key_of, with_keys
from tinsmith.gateway import auth, recent
from tinsmith.gateway.auth import PUBLIC_PATHS
from tinsmith.gateway.recent import Recent
from tinsmith.gateway.tokens import PURPOSE, Tokens
from tinsmith.protocol.errors import StateContention
from tinsmith.state.signing_keys import ROTATION_MS, SigningKeys

STRANGERS = ["", "tml-test", "tml-0123456789ab-" + "A" * 43, "wrong"]
PATHS = ["/api/v1/get_server_capabilities", f"{NATIVE_PREFIX}/capabilities", "/openapi.json", "/no/such/path"]


@pytest.fixture
async def face(tmp_path: Path) -> AsyncIterator[Face]:
    async with open_face(auth=with_keys(tmp_path, operators=["ops"])) as opened:
        yield opened


@pytest.fixture
def forgetful(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is remembered of a key."""
    monkeypatch.setattr(recent, "KEPT_S", 0.0)


# Keys.


@pytest.mark.parametrize("path", PATHS)
async def test_without_a_sound_key_nothing_is_told(face: Face, path: str) -> None:
    answers = [await face.http.get(path)]
    answers += [await face.http.get(path, headers={"X-API-Key": key}) for key in STRANGERS]
    answers += [await face.http.get(path, headers={"Authorization": f"Bearer {key}"}) for key in STRANGERS]
    text, record = await key_of(face, "acme")
    await face.services.keyring.revoke(record.key_id, 1)
    answers.append(await face.http.get(path, headers={"X-API-Key": text}))
    answers.append(await face.http.get(path, headers={"X-API-Key": text[:-1] + ("A" if text[-1] != "A" else "B")}))
    said = set()
    for answer in answers:
        body = answer.json()
        assert (answer.status_code, body["reason"], answer.headers["www-authenticate"]) == (401, "unauthenticated", "Bearer")
        said.add(body.get("detail", body.get("error")))
    assert len(said) == 1


@pytest.mark.parametrize("header", ["X-API-Key", "Authorization"])
async def test_a_key_is_taken_from_either_header_on_every_face(face: Face, header: str) -> None:
    text, _ = await key_of(face, "acme")
    credential = {header: text if header == "X-API-Key" else f"bearer {text}"}
    for path in PATHS[:3]:
        assert (await face.http.get(path, headers=credential)).status_code == 200
    created = await face.http.post("/api/v1/create_session", json={}, headers=credential)
    assert [record.session_id for record in await face.services.catalog.sessions("acme")] == [created.json()["session_id"]]
    assert await face.services.catalog.sessions("local") == []


@pytest.mark.parametrize("path", sorted(PUBLIC_PATHS))
async def test_probes_and_scrapers_need_no_key(face: Face, path: str) -> None:
    assert (await face.http.get(path)).status_code != 401


async def test_with_keys_any_host_and_origin_may_ask(face: Face) -> None:
    text, _ = await key_of(face, "acme")
    answer = await face.http.post(
        "/api/v1/create_session", json={}, headers={"host": "gpu.example:443", "origin": "http://app.example", "X-API-Key": text}
    )
    assert answer.status_code == 200


def counted(face: Face, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Key ids that are read from the keyring from now on."""
    reads: list[str] = []
    look_up: Callable[[str], object] = face.services.keyring.find
    records = face.services.authenticator._records  # type: ignore[attr-defined]

    async def count(key_id: str) -> object:
        reads.append(key_id)
        return await look_up(key_id)  # type: ignore[misc]

    monkeypatch.setattr(records, "_look_up", count)
    return reads


async def test_a_key_costs_one_read_in_a_while_and_a_malformed_one_none(face: Face, monkeypatch: pytest.MonkeyPatch) -> None:
    text, record = await key_of(face, "acme")
    reads = counted(face, monkeypatch)
    for key in [text, STRANGERS[2], STRANGERS[1], text[:-4] + "AAAA"] * 3:
        await face.http.get(PATHS[0], headers={"X-API-Key": key})
    assert reads == [record.key_id, "0123456789ab"]


async def test_a_key_that_is_revoked_elsewhere_ends_within_the_time(face: Face, monkeypatch: pytest.MonkeyPatch) -> None:
    text, record = await key_of(face, "acme")
    now = [100.0]
    monkeypatch.setattr(face.services.authenticator._records, "_clock", lambda: now[0])  # type: ignore[attr-defined]
    async with client_of(face, text) as http:
        assert (await http.get(PATHS[0])).status_code == 200
        await face.services.keyring.revoke(record.key_id, 1)
        now[0] += recent.KEPT_S
        assert (await http.get(PATHS[0])).status_code == 401
    assert recent.KEPT_S <= 5


async def test_while_the_keys_are_away_callers_are_told_to_come_again(face: Face, monkeypatch: pytest.MonkeyPatch) -> None:
    async def away(_: str) -> None:
        raise StateContention("the store is away; come again")

    monkeypatch.setattr(auth, "HOLD_S", 0.0)
    monkeypatch.setattr(face.services.authenticator._records, "_look_up", away)  # type: ignore[attr-defined]
    answer = await face.http.get(PATHS[0], headers={"X-API-Key": STRANGERS[2]})
    assert (answer.status_code, answer.headers["retry-after"]) == (503, "1")


async def test_strangers_push_out_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[str] = []

    async def look_up(id: str) -> str | None:
        asked.append(id)
        return id if id.startswith("known") else None

    monkeypatch.setattr(recent, "MAX_KEPT", 3)
    recently: Recent[str] = Recent(look_up, lambda: 0.0)
    for asking in ("known", *(f"stranger-{number}" for number in range(5)), "known", "stranger-4", "stranger-0"):
        await recently.get(asking)
    assert asked == ["known", *(f"stranger-{number}" for number in range(5)), "stranger-0"]
    assert len(recently._absent) == 3


async def test_whose_a_key_is(face: Face) -> None:
    text, record = await key_of(face, "acme")
    assert await face.services.tenant_of_key(text) == "acme"
    assert [await face.services.tenant_of_key(key) for key in STRANGERS] == [None] * len(STRANGERS)
    assert face.services.tokens is not None
    assert await face.services.tenant_of_key(await face.services.tokens.issue(record)) == "acme"
    async with open_face() as without_keys:
        assert await without_keys.services.tenant_of_key("tml-any") == "local"


# The account of a key.


async def test_a_key_describes_itself(face: Face) -> None:
    text, record = await key_of(face, "acme", "ci")
    async with client_of(face, text) as http:
        described = (await http.get("/api/v1/auth/apikey/me")).json()
    assert described == {
        "key_id": int(record.key_id, 16),
        "name": "ci",
        "note": "",
        "details": {"org_details": {"name": "acme"}, "user_details": {"email": ""}},
    }


async def test_a_key_ends_itself_at_once(face: Face) -> None:
    text, record = await key_of(face, "acme", "ci")
    other, _ = await key_of(face, "acme")
    async with client_of(face, text) as http, client_of(face, other) as another:
        assert (await http.get(PATHS[0])).status_code == 200
        assert (await http.delete("/api/v1/auth/apikey/me")).status_code == 204
        assert (await http.get(PATHS[0])).status_code == 401
        assert (await another.get(PATHS[0])).status_code == 200
        (noted,) = (await another.get("/api/v1/audit", params={"event_type": "organizations"})).json()["entries"]
    assert (noted["event"], noted["event_details"]) == ("key_revoke", {"subject": record.key_id, "name": "ci"})
    assert text not in str(noted)


async def test_open_mode_describes_itself_and_revokes_nothing() -> None:
    async with open_face() as face:
        described = (await face.http.get("/api/v1/auth/apikey/me")).json()
        assert (described["name"], described["details"]["org_details"]["name"]) == ("open mode", "local")
        assert (await face.http.delete("/api/v1/auth/apikey/me")).json()["reason"] == "endpoint_unavailable"
        assert (await face.http.post("/api/v1/auth/token", json={})).json()["reason"] == "endpoint_unavailable"
        assert (await face.ok("/client/config", {}))["pjwt_auth_enabled"] is False


# Tokens.


async def exchanged(face: Face, key: str) -> str:
    async with client_of(face, key) as http:
        answer = await http.post("/api/v1/auth/token", json={})
    assert answer.status_code == 200, answer.text
    return str(answer.json()["jwt"])


async def test_a_token_stands_for_its_key(face: Face) -> None:
    text, record = await key_of(face, "acme")
    token = await exchanged(face, text)
    payload = jwt.decode(token, options={"verify_signature": False})
    assert payload == {
        "iat": payload["iat"],
        "exp": payload["iat"] + 3600,
        "sub": f"urn:tinsmith:key:{record.key_id}",
        "org_id": "acme",
        "email": "",
    }
    async with client_of(face, token) as http:
        created = await http.post("/api/v1/create_session", json={})
        config = (await http.post("/api/v1/client/config", json={})).json()
    assert [held.session_id for held in await face.services.catalog.sessions("acme")] == [created.json()["session_id"]]
    assert config["pjwt_auth_enabled"] is True


async def test_a_token_is_taken_on_every_face_and_in_either_header(face: Face) -> None:
    text, _ = await key_of(face, "acme")
    token = await exchanged(face, text)
    async with client_of(face, "") as http:
        del http.headers["x-api-key"]
        for header in ({"x-api-key": token}, {"authorization": f"Bearer {token}"}):
            created = (await http.post(f"{NATIVE_PREFIX}/create_session", json={}, headers=header)).json()["session_id"]
            assert created in [held.session_id for held in await face.services.catalog.sessions("acme")]
            listed = await http.get("/v1/models", headers=header)
            assert [model["id"] for model in listed.json()["data"]] == [BASE]
        for header in ({"x-api-key": f"{token}x"}, {"authorization": f"Bearer {token[:-9]}"}):
            assert (await http.post(f"{NATIVE_PREFIX}/create_session", json={}, headers=header)).status_code == 401
            refusal = await http.get("/v1/models", headers=header)
            assert (refusal.status_code, refusal.json()["error"]["code"]) == (401, "invalid_api_key")


async def test_an_exchange_prolongs_no_token_and_a_token_ends_no_key(face: Face) -> None:
    text, _ = await key_of(face, "acme")
    token = await exchanged(face, text)
    assert await exchanged(face, token) == token
    async with client_of(face, token) as http:
        assert (await http.delete("/api/v1/auth/apikey/me")).json()["reason"] == "request_rejected"
        assert (await http.get(PATHS[0])).status_code == 200


async def refused(face: Face, token: str) -> bool:
    """As a token, so that its holder exchanges its key again."""
    async with client_of(face, token) as http:
        answer = await http.get(PATHS[0])
    assert answer.status_code in (200, 401)
    if answer.status_code == 401:
        assert answer.headers["www-authenticate"] == 'Bearer error="invalid_token"'
    return answer.status_code == 401


async def test_a_token_ends_with_its_key(face: Face, forgetful: None) -> None:
    text, record = await key_of(face, "acme")
    token = await exchanged(face, text)
    assert not await refused(face, token)
    await face.services.keyring.revoke(record.key_id, 1)
    assert await refused(face, token)


async def test_a_token_expires(face: Face) -> None:
    _, record = await key_of(face, "acme")
    keys = SigningKeys(face.store, PURPOSE)
    assert not await refused(face, await Tokens(keys, 120).issue(record))
    assert await refused(face, await Tokens(keys, 120, clock=lambda: 1_000.0).issue(record))


async def test_a_token_outlives_one_rotation_and_no_second(face: Face, forgetful: None) -> None:
    text, _ = await key_of(face, "acme")
    token = await exchanged(face, text)
    face.advance(ROTATION_MS)
    newer = await exchanged(face, text)
    assert jwt.get_unverified_header(newer)["kid"] != jwt.get_unverified_header(token)["kid"]
    assert not await refused(face, token)
    face.advance(ROTATION_MS)
    assert await refused(face, token)
    assert not await refused(face, newer)


async def test_a_token_of_another_signature_is_refused(face: Face) -> None:
    text, _ = await key_of(face, "acme")
    genuine = await exchanged(face, text)
    head, payload = jwt.get_unverified_header(genuine), jwt.decode(genuine, options={"verify_signature": False})
    other_purpose = await SigningKeys(face.store, "links").current()
    forged = {
        "another key": jwt.encode(payload, "x" * 32, "HS256", head),
        "no signature": jwt.encode(payload, "", "none", {"kid": head["kid"]}),
        "an unknown generation": jwt.encode(payload, "x" * 32, "HS256", {"kid": "0" * 16}),
        "no generation": jwt.encode(payload, "x" * 32, "HS256"),
        "another purpose": jwt.encode(payload, other_purpose.secret, "HS256", {"kid": other_purpose.key_id}),
        "a damaged payload": genuine.replace(genuine.split(".")[1], genuine.split(".")[1][::-1]),
        "nothing in it": "eyJ",
    }
    assert {why: await refused(face, token) for why, token in forged.items()} == dict.fromkeys(forged, True)


@pytest.mark.parametrize("claim", ["exp", "iat", "sub"])
async def test_a_token_must_say_whose_and_how_long(face: Face, claim: str) -> None:
    text, _ = await key_of(face, "acme")
    payload = jwt.decode(await exchanged(face, text), options={"verify_signature": False})
    key = await SigningKeys(face.store, PURPOSE).current()
    without = {name: value for name, value in payload.items() if name != claim}
    assert await refused(face, jwt.encode(without, key.secret, "HS256", {"kid": key.key_id}))
    assert await refused(face, jwt.encode(payload | {"sub": "acme"}, key.secret, "HS256", {"kid": key.key_id}))


async def test_without_tokens_keys_serve_as_before(tmp_path: Path) -> None:
    async with open_face(auth=with_keys(tmp_path, jwt=False)) as face:
        text, record = await key_of(face, "acme")
        async with client_of(face, text) as http:
            assert (await http.post("/api/v1/client/config", json={})).json()["pjwt_auth_enabled"] is False
            assert (await http.post("/api/v1/auth/token", json={})).json()["reason"] == "endpoint_unavailable"
        assert await refused(face, await Tokens(SigningKeys(face.store, PURPOSE), 120).issue(record))


# Operators, rates and quotas.


async def test_only_an_operator_sees_and_drains_processes(face: Face) -> None:
    await face.take_samples()  # a worker lives
    mine, _ = await key_of(face, "acme")
    theirs, _ = await key_of(face, "ops")
    async with client_of(face, mine) as tenant, client_of(face, theirs) as operator:
        assert (await tenant.get(f"{NATIVE_PREFIX}/status")).json()["processes"] == []
        [process] = (await operator.get(f"{NATIVE_PREFIX}/status")).json()["processes"]
        order = {"process_id": process["process_id"]}
        answers = [await tenant.post(f"{NATIVE_PREFIX}/drain", json=body) for body in (order, {"process_id": "nobody"}, {})]
        assert [answer.status_code for answer in answers] == [400] * 3
        assert len({answer.json()["error"] for answer in answers}) == 1
        assert "auth.operators" in answers[0].json()["error"]
        assert (await operator.post(f"{NATIVE_PREFIX}/drain", json=order)).status_code == 200


async def create_model(face: Face, key: str) -> int:
    async with client_of(face, key) as http:
        session_id = (await http.post("/api/v1/create_session", json={})).json()["session_id"]
        answer = await http.post("/api/v1/create_model", json={"session_id": session_id, "model_seq_id": 0, "base_model": BASE})
    if answer.status_code == 429:
        assert int(answer.headers["retry-after"]) >= 1
    return answer.status_code


@pytest.mark.parametrize("limits", [{"requests_per_s": 0.5}, {"max_models": 1}])
async def test_rates_and_quotas_are_a_tenant_s_own_over_all_its_keys(tmp_path: Path, limits: dict[str, object]) -> None:
    async with open_face(auth=with_keys(tmp_path), limits=limits) as face:
        one, _ = await key_of(face, "acme")
        other, _ = await key_of(face, "acme")
        neighbour, _ = await key_of(face, "neighbour")
        assert [await create_model(face, key) for key in (one, other, neighbour)] == [200, 429, 200]


@pytest.mark.parametrize("path", ["/api/v1/create_model", f"{NATIVE_PREFIX}/create_model"])
async def test_every_face_says_when_to_come_again(path: str) -> None:
    async with open_face(limits={"requests_per_s": 0.1}) as face:
        body = {"session_id": await face.session(), "base_model": BASE, "model_seq" if NATIVE_PREFIX in path else "model_seq_id": 0}
        for seq in (0, 1):
            answer = await face.http.post(path, json={name: seq if name.startswith("model_seq") else value for name, value in body.items()})
        assert (answer.status_code, answer.headers["retry-after"]) == (429, "10")
