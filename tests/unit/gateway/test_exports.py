"""Checkpoints on their way out: external saves, links, archives; files are served to links alone."""

import io
import tarfile
from collections.abc import AsyncIterator
from datetime import datetime
from email.utils import parsedate_to_datetime
from pathlib import Path

import httpx
import pytest

from tests.fakes.face import Face, open_face
from tests.fakes.key_holders import key_of, with_keys
from tests.unit.gateway.test_checkpoints import OURS, RUN, get, theirs
from tests.unit.gateway.test_weights import keep, queued
from tinsmith.gateway.signing import LINK_S
from tinsmith.lifecycle.checkpoints import ArtifactKind, artifact_id
from tinsmith.protocol.sessions import CheckpointKind, CheckpointRecord
from tinsmith.protocol.training import SaveWeightsExternal

ADAPTER = {"adapter_config.json": b"{}", "adapter_model.safetensors": bytes(range(256)) * 9000}  # over one chunk, and no whole blocks
STATE = {"train_state.json": b"{}", "train_state.safetensors": b"moments"}


@pytest.fixture
async def face(tmp_path: Path) -> AsyncIterator[Face]:
    async with open_face(checkpoints={"dir": tmp_path}) as opened:
        yield opened


async def stored(face: Face, kind: CheckpointKind = CheckpointKind.EXTERNAL, **changes: object) -> CheckpointRecord:
    """A checkpoint with its files."""
    tenant = str(changes.get("tenant", "local"))
    artifact = artifact_id(tenant, RUN, ArtifactKind(kind.value), seq=1, token=1)
    face.services.artifacts.write(artifact, ADAPTER | (STATE if kind is CheckpointKind.TRAINING else {}))
    if tenant == "local":
        return await keep(face, kind=kind, artifact=artifact, **changes)
    return await theirs(face, kind=kind, artifact=artifact)


async def fetch(face: Face, url: str) -> httpx.Response:
    return await face.http.get(url)


async def urls_of(face: Face) -> dict[str, str]:
    response = await get(face, f"{OURS}/external_weights/n/external_weights_urls")
    assert response.status_code == 200, response.text
    urls: dict[str, str] = response.json()["urls"]
    return urls


async def test_an_external_save_takes_its_turn(face: Face):
    model_id = await face.model()
    body = {"model_id": model_id, "seq_id": 1, "path": "n", "ttl_seconds": 3600, "age_encryption_recipients": None}
    promise = await face.ok("/save_weights_external", body)
    assert await face.ok("/save_weights_external", body) == promise
    assert await queued(face, model_id) == SaveWeightsExternal(name="n", ttl_seconds=3600)


async def test_links_to_the_files_of_external_weights(face: Face):
    await stored(face)
    body = (await get(face, f"{OURS}/external_weights/n/external_weights_urls")).json()
    assert datetime.fromisoformat(body["expires"]).timestamp() == face.clock[0] // 1000 + LINK_S
    assert set(body["urls"]) == set(ADAPTER)
    for name, url in body["urls"].items():
        assert url.startswith("http://127.0.0.1:8700/api/v1/downloads/files/")
        answer = await fetch(face, url)
        assert answer.content == ADAPTER[name]
        assert answer.headers["content-length"] == str(len(ADAPTER[name]))


async def test_a_link_is_to_one_file(face: Face):
    await stored(face)
    url = (await urls_of(face))["adapter_config.json"]
    for other in (
        url.replace("adapter_config.json", "adapter_model.safetensors"),
        url.replace("/1-1/", "/2-1/"),
        url.replace("tenant=local", "tenant=other"),
        url.replace("/files/", "/archives/").replace("/adapter_config.json", ""),
        url.partition("?")[0],
    ):
        assert (await fetch(face, other)).status_code == 404
    assert (await face.http.request("DELETE", url)).status_code == 405


async def test_a_link_ends_after_an_hour(face: Face):
    await stored(face)
    url = (await urls_of(face))["adapter_config.json"]
    face.advance(LINK_S * 1000 - 1000)
    assert (await fetch(face, url)).status_code == 200
    face.advance(1000)
    assert (await fetch(face, url)).status_code == 404


@pytest.mark.parametrize("kind", [CheckpointKind.TRAINING, CheckpointKind.SAMPLER])
async def test_other_kinds_have_no_external_weights(face: Face, kind: CheckpointKind):
    await stored(face, kind)
    answer = await get(face, f"{OURS}/{kind}/n/external_weights_urls")
    assert (answer.status_code, "save_weights_external" in answer.json()["detail"]) == (422, True)


@pytest.mark.parametrize("kind", list(CheckpointKind))
async def test_an_archive_holds_the_adapter_and_the_mark_of_completeness(face: Face, kind: CheckpointKind):
    await stored(face, kind)
    answer = await get(face, f"{OURS}/{kind}/n/archive", accept="application/json")
    assert set(answer.json()) == {"url", "expires"}
    archive = await fetch(face, answer.json()["url"])
    assert archive.headers["content-length"] == str(len(archive.content))
    with tarfile.open(fileobj=io.BytesIO(archive.content), mode="r:") as tar:
        found = {member.name: file.read() for member in tar.getmembers() if (file := tar.extractfile(member)) is not None}
        assert tar.getnames()[-1] == "checkpoint_complete"
    assert found == ADAPTER | {"checkpoint_complete": b""}


async def test_an_archive_is_a_redirect_for_older_clients(face: Face):
    await stored(face)
    answer = await get(face, f"{OURS}/external_weights/n/archive", accept="application/gzip")
    assert answer.status_code == 302
    assert parsedate_to_datetime(answer.headers["expires"]).timestamp() == face.clock[0] // 1000 + LINK_S
    assert answer.headers["expires"].endswith("GMT")
    assert (await fetch(face, answer.headers["location"])).headers["content-type"] == "application/x-tar"


async def test_a_damaged_file_is_not_served_whole(face: Face, tmp_path: Path):
    held = await stored(face)
    url = (await urls_of(face))["adapter_model.safetensors"]
    (tmp_path / held.artifact / "adapter_model.safetensors").write_bytes(bytes(len(ADAPTER["adapter_model.safetensors"])))
    try:
        served = len((await fetch(face, url)).content)
    except httpx.HTTPError:
        served = 0
    assert served < len(ADAPTER["adapter_model.safetensors"])


async def test_files_that_are_gone(face: Face):
    held = await stored(face)
    url = (await urls_of(face))["adapter_config.json"]
    face.services.artifacts.delete(held.artifact)
    assert (await fetch(face, url)).status_code == 404
    for what in ("archive", "external_weights_urls"):
        assert (await get(face, f"{OURS}/external_weights/n/{what}")).status_code == 404


async def test_others_download_what_is_published(face: Face):
    held = await stored(face, tenant="other")
    path = f"/training_runs/{held.run_id}/checkpoints/external_weights/n"
    assert (await get(face, f"{path}/archive", accept="application/json")).status_code == 404
    assert (await get(face, f"{path}/external_weights_urls")).status_code == 404
    await face.services.publications.publish(held)
    (url, *_) = (await get(face, f"{path}/external_weights_urls")).json()["urls"].values()
    assert (await fetch(face, url)).status_code == 200
    assert (await get(face, f"{path}/archive", accept="application/json")).status_code == 200


async def test_a_link_needs_no_key_and_nothing_else_does_without(tmp_path: Path):
    async with open_face(checkpoints={"dir": tmp_path}, auth=with_keys(tmp_path)) as face:
        await stored(face)
        assert (await face.http.get("/api/v1/checkpoints")).status_code == 401
        answer = await face.http.get("/api/v1/downloads/archives/local/m/weights/1-1")
        assert (answer.status_code, "link" in answer.json()["detail"]) == (404, True)
        assert (await face.http.get("/api/v1/downloads")).status_code == 401


async def test_a_link_of_one_tenant_cannot_be_bent_to_anothers_files(tmp_path: Path):
    """Nor is its holder told what is there: a bent link is answered as one to nothing."""
    async with open_face(checkpoints={"dir": tmp_path}, auth=with_keys(tmp_path)) as face:
        records = {tenant: await stored_of(face, tenant) for tenant in ("acme", "zebra")}
        text, _ = await key_of(face, "acme")
        listed = await face.http.get(f"/api/v1{OURS}/external_weights/n/external_weights_urls", headers={"x-api-key": text})
        url = listed.json()["urls"]["adapter_config.json"]
        assert (await fetch(face, url)).content == ADAPTER["adapter_config.json"]
        mine, others = records["acme"].artifact, records["zebra"].artifact
        bent = [url.replace(mine, others), url.replace("tenant=acme", "tenant=zebra")]
        bent += [
            bent[0].replace("tenant=acme", "tenant=zebra"),
            url.replace(mine, "zebra/nothing"),
            url.replace("/files/", f"/files/{others}/../"),
        ]
        answers = [await fetch(face, link) for link in bent]
        assert {answer.status_code for answer in answers} == {404}
        assert len({answer.json()["detail"] for answer in answers}) == 1


async def stored_of(face: Face, tenant: str) -> CheckpointRecord:
    artifact = artifact_id(tenant, RUN, ArtifactKind.EXTERNAL, seq=1, token=1)
    face.services.artifacts.write(artifact, ADAPTER)
    return await keep(face, tenant=tenant, kind=CheckpointKind.EXTERNAL, artifact=artifact)


async def test_a_credential_of_another_account_opens_its_checkpoints_alone(tmp_path: Path):
    """For a load and a copy; to everything else that the caller does it gives nothing."""
    async with open_face(checkpoints={"dir": tmp_path}, auth=with_keys(tmp_path)) as face:
        theirs_key, _ = await key_of(face, "other")
        own_key, _ = await key_of(face, "mine")
        face.http.headers["X-API-Key"] = own_key
        held, session_id = await theirs(face), await face.session()
        load = {"session_id": session_id, "model_seq_id": 0, "path": held.path, "optimizer": False}
        copy = {"session_id": session_id, "model_seq_id": 1, "source_path": held.path}
        token = {"X_Tinker_Weights_Access_Token": theirs_key}
        assert (await face.post("/load_weights", load)).status_code == 404
        assert (await face.post("/copy_weights", copy)).status_code == 404
        assert (await face.post("/load_weights", load | {"weights_access_token": "tml-nobody"})).status_code == 401
        assert (await face.post("/copy_weights", copy, X_Tinker_Weights_Access_Token="tml-nobody")).status_code == 401
        await face.ok("/load_weights", load | {"weights_access_token": theirs_key})
        await face.ok("/copy_weights", copy, **token)
        assert [record.artifact for record in await face.services.catalog.checkpoints("mine")] == [held.artifact]
        assert (await face.post("/weights_info", {"tinker_path": held.path}, **token)).status_code == 404
        assert theirs_key.split("-", 2)[2] not in repr((vars(face.store), vars(face.lanes)))
