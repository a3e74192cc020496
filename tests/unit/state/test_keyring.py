"""API keys as they are kept: every keyring, in a store and in a file, behaves the same."""

import asyncio
import os
import re
from pathlib import Path

import pytest

from tinsmith.protocol.errors import NotFound, StateContention
from tinsmith.state.key_file import FileKeyring
from tinsmith.state.keyring import Keyring, StoreKeyring, is_proved, issue, split_key
from tinsmith.state.memory_store import MemoryStore


@pytest.fixture(params=["store", "file"])
def keyring(request: pytest.FixtureRequest, tmp_path: Path) -> Keyring:
    return StoreKeyring(MemoryStore()) if request.param == "store" else FileKeyring(tmp_path / "below" / "keys.json")


async def test_a_key_is_found_by_its_prefix_and_proved_by_its_secret(keyring: Keyring) -> None:
    text, record = await issue(keyring, "acme", "ci", 5)
    assert re.fullmatch(r"tml-[0-9a-f]{12}-[A-Za-z0-9_-]{43}", text)
    parts = split_key(text)
    assert parts is not None
    key_id, secret = parts
    held = await keyring.find(key_id)
    assert held == record
    assert (held.tenant, held.name, held.created_ms, held.revoked_ms) == ("acme", "ci", 5, None)
    assert is_proved(held, key_id, secret)
    assert not is_proved(held, key_id, "A" * 43)
    assert not is_proved(held, "0" * 12, secret), "a hash proves nothing under another id"
    assert not is_proved(None, key_id, secret)
    assert await keyring.find("0" * 12) is None


async def test_the_secret_is_not_kept(keyring: Keyring) -> None:
    text, record = await issue(keyring, "acme", "", 5)
    _, secret = split_key(text) or ("", "")
    [held] = await keyring.records()
    assert secret not in held.model_dump_json()
    assert len(held.digest) == 64
    assert record.digest not in repr(held)


async def test_a_key_is_revoked_once(keyring: Keyring) -> None:
    _, record = await issue(keyring, "acme", "", 5)
    assert (await keyring.revoke(record.key_id, 7)).revoked_ms == 7
    assert (await keyring.revoke(record.key_id, 9)).revoked_ms == 7
    found = await keyring.find(record.key_id)
    assert found is not None
    assert found.revoked_ms == 7
    with pytest.raises(NotFound, match="tinsmith keys list"):
        await keyring.revoke("0" * 12, 7)


async def test_an_id_is_given_once(keyring: Keyring) -> None:
    _, record = await issue(keyring, "acme", "", 5)
    with pytest.raises(StateContention):
        await keyring.add(record)


@pytest.mark.parametrize("text", ["", "tml-", "tml-test", "tml-0123456789ab-short", "eyJhbGciOi.e30.x", "tml-0123456789AB-" + "a" * 43])
def test_what_is_no_key_has_no_parts(text: str) -> None:
    assert split_key(text) is None


# The file.


async def test_another_process_s_change_of_the_file_is_seen(tmp_path: Path) -> None:
    reader, writer = FileKeyring(tmp_path / "keys.json"), FileKeyring(tmp_path / "keys.json")
    assert await reader.records() == []
    _, record = await issue(writer, "acme", "", 5)
    assert await reader.find(record.key_id) == record
    await writer.revoke(record.key_id, 7)
    found = await reader.find(record.key_id)
    assert found is not None
    assert found.revoked_ms == 7


async def test_writers_at_once_lose_nothing(tmp_path: Path) -> None:
    issued = await asyncio.gather(*(issue(FileKeyring(tmp_path / "keys.json"), "acme", str(number), 5) for number in range(8)))
    held = await FileKeyring(tmp_path / "keys.json").records()
    assert {record.key_id for record in held} == {record.key_id for _, record in issued}


async def test_the_file_is_its_owner_s_alone_and_holds_no_secret(tmp_path: Path) -> None:
    text, _ = await issue(FileKeyring(tmp_path / "keys.json"), "acme", "", 5)
    assert os.stat(tmp_path / "keys.json").st_mode & 0o077 == 0
    for path in tmp_path.iterdir():
        assert text.rpartition("-")[2] not in path.read_text()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["keys.json", "keys.json.lock"]


@pytest.mark.parametrize(("content", "said"), [("nonsense", "no list of keys"), ('{"schema_version": 99, "keys": {}}', "upgrade tinsmith")])
async def test_a_file_that_cannot_be_read_lets_nobody_in(tmp_path: Path, content: str, said: str) -> None:
    (tmp_path / "keys.json").write_text(content)
    keyring = FileKeyring(tmp_path / "keys.json")
    with pytest.raises(StateContention, match=said):
        await keyring.find("0" * 12)
    with pytest.raises(StateContention, match=said):
        await issue(keyring, "acme", "", 5)
    assert (tmp_path / "keys.json").read_text() == content
