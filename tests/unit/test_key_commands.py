"""`tinsmith keys`: what it prints where, what it keeps, and its exit codes."""

import asyncio
import json
import re
from pathlib import Path

import pytest

from tests.redis_server import RedisServer
from tinsmith import cli
from tinsmith.state.audit import AuditEvent, AuditLog
from tinsmith.state.days import day_of
from tinsmith.state.redis_store import RedisStore

KEY = re.compile(r"tml-([0-9a-f]{12})-[A-Za-z0-9_-]{43}\n")


@pytest.fixture
def path(tmp_path: Path) -> Path:
    path = tmp_path / "server.yaml"
    path.write_text(f"models: [{{name: org/model}}]\nauth: {{mode: keys, keys_file: {tmp_path / 'keys.json'}}}\n")
    return path


def added(path: Path, capsys: pytest.CaptureFixture[str], tenant: str, name: str = "") -> tuple[str, str]:
    """The text of a new key, and its id."""
    assert cli.main(["keys", "add", "--tenant", tenant, "--name", name, str(path)]) == 0
    captured = capsys.readouterr()
    found = KEY.fullmatch(captured.out)
    assert found is not None
    assert found[1] in captured.err
    assert captured.out.strip() not in captured.err
    return found[0].strip(), found[1]


def test_a_key_is_added_listed_and_revoked(path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    text, key_id = added(path, capsys, "acme", "ci")
    _, other_id = added(path, capsys, "zebra")
    assert cli.main(["keys", "list", str(path)]) == 0
    listed = capsys.readouterr().out
    heads, one, other = listed.splitlines()
    assert heads.split() == ["KEY", "TENANT", "NAME", "CREATED", "STATE"]
    assert (one.split()[:3], one.split()[4]) == ([key_id, "acme", "ci"], "valid")
    assert other.split()[:3] == [other_id, "zebra", "-"]
    assert text not in listed
    assert cli.main(["keys", "revoke", key_id, str(path)]) == 0
    assert capsys.readouterr().out == f"key {key_id} of tenant acme revoked\n"
    assert cli.main(["keys", "list", "--tenant", "acme", "--json", str(path)]) == 0
    [record] = json.loads(capsys.readouterr().out)
    assert sorted(record) == ["created_ms", "key_id", "name", "revoked_ms", "tenant"]
    assert record["revoked_ms"] >= record["created_ms"]


def test_the_whole_key_names_itself_too(path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    text, key_id = added(path, capsys, "acme")
    assert cli.main(["keys", "revoke", text, str(path)]) == 0
    assert key_id in capsys.readouterr().out


async def audited(url: str, tenant: str) -> list[tuple[AuditEvent, str, dict[str, str]]]:
    """What the audit log of the tenant says of today; yesterday's too, should the day have just begun."""
    store = RedisStore(url)
    try:
        await store.open()
        today, log = day_of(await store.now_ms()), AuditLog(store, tenant)
        entries = [*await log.day(today - 1), *await log.day(today)]
    finally:
        await store.close()
    return [(entry.event, entry.subject, entry.details) for entry in entries]


def test_keys_of_a_server_over_redis_lie_in_redis(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "server.yaml"
    with RedisServer() as redis:
        path.write_text(f"models: [{{name: org/model}}]\nstore: {{kind: redis, url: '{redis.url}'}}\n")
        assert cli.main(["keys", "add", "--tenant", "acme", "--name", "ci", str(path)]) == 0
        captured = capsys.readouterr()
        key_id = captured.out.split("-")[1]
        assert "auth.mode is open" in captured.err
        assert cli.main(["keys", "list", str(path)]) == 0
        assert key_id in capsys.readouterr().out
        assert cli.main(["keys", "revoke", key_id, str(path)]) == 0
        assert cli.main(["keys", "revoke", key_id, str(path)]) == 0
        noted = asyncio.run(audited(redis.url, "acme"))
    assert noted == [(AuditEvent.KEY_ADD, key_id, {"name": "ci"}), (AuditEvent.KEY_REVOKE, key_id, {"name": "ci"})]
    assert [file.name for file in tmp_path.iterdir()] == ["server.yaml"]


@pytest.mark.parametrize(
    ("arguments", "code", "said"),
    [
        (["add", "--tenant", "a/b"], 2, "--tenant: 'a/b' is no tenant"),
        (["add", "--tenant", "system"], 2, "--tenant: 'system' is taken by the server itself"),
        (["add", "--tenant", "acme", "--name", "a\nb"], 2, "--name: must be printable"),
        (["revoke", "0123456789ab"], 1, "key '0123456789ab' is unknown"),
    ],
)
def test_a_refusal_is_a_line_with_the_remedy(
    path: Path, capsys: pytest.CaptureFixture[str], arguments: list[str], code: int, said: str
) -> None:
    assert cli.main(["keys", *arguments, str(path)]) == code
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.startswith(said)
    assert ";" in captured.err


def test_a_memory_store_without_a_file_has_no_keys_to_manage(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "server.yaml"
    path.write_text("models: [{name: org/model}]\n")
    assert cli.main(["keys", "list", str(path)]) == 2
    assert capsys.readouterr().err.startswith("auth.keys_file: missing")
