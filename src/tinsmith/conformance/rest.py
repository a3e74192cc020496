"""Items 12 and 13: what RestClient and the `tinker` program ask."""

import json
import os
import subprocess
import sys
import tempfile
import uuid
from typing import Any

import httpx

from tinsmith.conformance.items import (
    Item,
    Mismatch,
    NotRun,
    Target,
    answer,
    client,
    expect,
    expect_equal,
    is_release,
    item,
    needs,
    needs_option,
    needs_release,
)
from tinsmith.conformance.raw import Wire

PROGRAM_S = 600.0  # of all commands
USAGE = 2  # exit status where a release has no such command, option or argument
# Runs commands of the program one after another in one process, which imports it once.
PROGRAM = """
import json, sys
from click.testing import CliRunner
from tinker.cli.__main__ import main_cli
for words in json.load(sys.stdin):
    done = CliRunner().invoke(main_cli, words)
    print(json.dumps([done.exit_code, done.output, repr(done.exception)]), flush=True)
"""
DAY_S = 24 * 3600


@item("12a", "runs and checkpoints: listed, paged, described")
def listings(target: Target) -> None:
    service = target.service()
    trainer = target.trainer(service)
    names = [f"listed-{index}-{uuid.uuid4().hex[:8]}" for index in range(3)]
    paths = [answer(trainer.save_state(name)).path for name in names]
    rest = service.create_rest_client()
    run_id = paths[0].removeprefix("tinker://").split("/")[0]
    run = answer(rest.get_training_run(run_id))
    expect_equal((run.training_run_id, run.base_model, run.lora_rank), (run_id, target.model, 8), "training run")
    listed = [checkpoint.tinker_path for checkpoint in answer(rest.list_checkpoints(run_id)).checkpoints]
    expect_equal(listed, paths[::-1], "checkpoints of the run, newest first")
    pages = [answer(rest.list_user_checkpoints(limit=1, offset=offset)).checkpoints[0].tinker_path for offset in range(2)]
    expect_equal(pages, paths[:0:-1], "checkpoints of the user, a page of one each")
    runs = [held.training_run_id for held in answer(rest.list_training_runs(limit=5)).training_runs]
    expect(run_id in runs, "the newest run is not among the first 5")
    if hasattr(rest, "get_weights_info_by_tinker_path"):
        info = answer(rest.get_weights_info_by_tinker_path(paths[0]))
        expect_equal((info.base_model, info.is_lora, info.lora_rank), (target.model, True, 8), "weights_info")


@item("12b", "publish and unpublish twice, a time to live set and removed, delete")
def changes(target: Target) -> None:
    service = target.service()
    trainer = target.trainer(service)
    path = answer(trainer.save_state(f"changed-{uuid.uuid4().hex[:8]}")).path
    rest = service.create_rest_client()
    run_id = path.removeprefix("tinker://").split("/")[0]

    def held() -> Any:
        found = [checkpoint for checkpoint in answer(rest.list_checkpoints(run_id)).checkpoints if checkpoint.tinker_path == path]
        return found[0] if found else None

    for _ in range(2):
        answer(rest.publish_checkpoint_from_tinker_path(path))
        expect_equal(held().public, True, "public")
    for _ in range(2):
        answer(rest.unpublish_checkpoint_from_tinker_path(path))
        expect_equal(held().public, False, "public")
    if hasattr(rest, "set_checkpoint_ttl_from_tinker_path"):
        answer(rest.set_checkpoint_ttl_from_tinker_path(path, DAY_S))
        expect(held().expires_at is not None, "expires_at is unset after a time to live")
        answer(rest.set_checkpoint_ttl_from_tinker_path(path, None))
        expect_equal(held().expires_at, None, "expires_at")
    answer(rest.delete_checkpoint_from_tinker_path(path))
    expect_equal(held(), None, "a checkpoint that was deleted")


@item("12c", "copy_weights: of a checkpoint, into a project, and twice under one key")
def copies(target: Target) -> None:
    service = target.service()
    rest = service.create_rest_client()
    needs(rest, "copy_weights")
    trainer = target.trainer(service)
    path = answer(trainer.save_state("copied")).path
    needs_option(rest.copy_weights, "destination_project_id")
    copy = answer(rest.copy_weights(path, "a-project"))
    expect(copy != path and copy.startswith("tinker://"), f"copy_weights: {copy!r}")
    resumed = client(service.create_training_client_from_state(copy))
    expect_equal(resumed.get_info().lora_rank, 8, "lora_rank of a model that began from the copy")
    with Wire(target) as wire:
        key = {"x-idempotency-key": uuid.uuid4().hex}
        asked = {"source_path": path, "destination_project_id": "a-project", "ttl_seconds": DAY_S}
        told = [wire.ok("copy_weights", asked, key)["tinker_path"] for _ in range(2)]
        expect_equal(told[1], told[0], "path of a copy that was asked for again under the same key")


@item("12d", "sessions: listed, described, put into a project, found")
def found_sessions(target: Target) -> None:
    mark = uuid.uuid4().hex
    service = target.service(user_metadata={"mark": mark})
    rest = service.create_rest_client()
    needs(rest, "list_sessions")
    session_id = target.trainer(service).get_info().model_id.split(":")[0]
    expect(session_id in answer(rest.list_sessions(limit=100)).sessions, "the session is not listed")
    expect_equal(list(answer(rest.get_session(session_id)).training_run_ids), [f"{session_id}:train:0"], "training_run_ids of the session")
    if hasattr(rest, "assign_session_project"):
        answer(rest.assign_session_project(session_id, "a-project"))
    needs_release(0, 38)
    with Wire(target) as wire:
        asked = {"user_metadata": {"mark": mark}, "owner": {"type": "own"}, "limit": 5}
        [found] = wire.ok("sessions/search", asked)["sessions"]
        expect_equal((found["session_id"], found["status"]["type"]), (session_id, "active"), "session_id and status of what was found")
        expect_equal(found["project_id"], "a-project", "project_id of what was found")


@item("12e", "external weights: a PEFT adapter behind links that need no key")
def downloads(target: Target) -> None:
    service = target.service()
    trainer = target.trainer(service)
    needs(trainer, "save_weights_external")
    path = answer(trainer.save_weights_external(f"outside-{uuid.uuid4().hex[:8]}")).path
    expect("/external_weights/" in path, f"path: {path!r}")
    told = answer(service.create_rest_client().get_external_weights_urls(path))
    expect(told.expires.tzinfo is not None, "expires has no time zone")
    files = {name: httpx.get(str(httpx.URL(target.base_url).join(url)), timeout=60.0) for name, url in told.urls.items()}
    expect_equal({name for name, held in files.items() if held.status_code != 200}, set(), "files whose link does not serve")
    missing = {"adapter_config.json", "adapter_model.safetensors"} - set(files)
    expect(not missing, f"files that are missing: {sorted(missing)}")


@item("13", "every command of the tinker program, as a table and as JSON")
def program(target: Target) -> None:
    service = target.service()
    trainer = target.trainer(service)
    paths = [answer(trainer.save_state(f"shown-{index}-{uuid.uuid4().hex[:8]}")).path for index in range(3)]
    run_id = paths[0].removeprefix("tinker://").split("/")[0]
    with tempfile.TemporaryDirectory(prefix="conformance-") as directory:
        told = _shown(run_id, paths[0]) + _whoami(service)
        done = [["checkpoint", *words] for words in _changed(paths[0], directory)]
        commands = [["--format", form, *words] for form in ("table", "json") for words in (*told, *done)]
        commands += [
            ["--format", form, "checkpoint", "delete", "--yes", path] for form, path in zip(("table", "json"), paths[1:], strict=True)
        ]
        answers = _run(target, commands)
    unknown = 0
    for words, (code, output, error) in zip(commands, answers, strict=True):
        if code == USAGE:
            unknown += 1
            continue
        expect_equal(code, 0, f"exit status of tinker {' '.join(words)} ({output[-200:].strip()} {error[:200]})")
        if words[2:] not in told:
            continue
        # A table of no usage is empty.
        expect(output.strip() or words[2] == "billing", f"tinker {' '.join(words)} prints nothing")
        if words[1] == "json" and words[2] not in ("version", "auth"):
            text = json.dumps(_parsed(output, words))
            expect(words[2] not in ("run", "checkpoint") or run_id in text, f"tinker {' '.join(words)} does not name the run")
    expect(unknown < len(commands) // 2, f"{unknown} of {len(commands)} commands are unknown to this release")


def _shown(run_id: str, path: str) -> list[list[str]]:
    """Commands that only tell."""
    return [
        ["version"],
        ["auth", "status"],
        ["model", "list"],
        ["run", "list"],
        ["run", "info", run_id],
        ["checkpoint", "list"],
        ["checkpoint", "list", "--run-id", run_id],
        ["checkpoint", "info", path],
        ["session", "export-trace", run_id.partition(":")[0], "--url-only"],
        ["billing", "usage", "2025-01-01T00:00:00Z", "2025-01-02T00:00:00Z"],
        ["billing", "checkpoint-storage"],
    ]


def _whoami(service: Any) -> list[list[str]]:
    """The command that a key alone cannot answer."""
    config = service.holder.get_client_config() if hasattr(service.holder, "get_client_config") else None
    return [["auth", "whoami"]] if getattr(config, "pjwt_auth_enabled", False) else []


def _changed(path: str, directory: str) -> list[list[str]]:
    """Commands of `tinker checkpoint` that change something, none of which minds being run twice."""
    changing = [["publish", path], ["unpublish", path], ["set-ttl", path, "--ttl", str(DAY_S)], ["set-ttl", path, "--remove"]]
    # Older releases fail at their own reading of the answer, before they look at it.
    return [*changing, *([["download", path, "--output", directory, "--force"]] if is_release(0, 25) else [])]


def _parsed(output: str, words: list[str]) -> Any:
    """Raises Mismatch where it is no JSON. Warnings may come first."""
    start = min((index for mark in "{[" if (index := output.find(mark)) >= 0), default=0)
    try:
        return json.loads(output[start:])
    except ValueError as error:
        raise Mismatch(f"tinker {' '.join(words)} prints no JSON: {output[:200].strip()}") from error


def _run(target: Target, commands: list[list[str]]) -> list[tuple[int, str, str]]:
    """Exit status, output and exception of each. Raises Mismatch where the program cannot be run, NotRun where there is none."""
    env = os.environ | {"TINKER_BASE_URL": target.base_url, "TINKER_API_KEY": target.api_key, "COLUMNS": "400"}
    done = subprocess.run(  # noqa: S603 (words of this module)
        [sys.executable, "-c", PROGRAM],
        input=json.dumps(commands),
        env=env,
        capture_output=True,
        text=True,
        check=False,
        timeout=PROGRAM_S,
    )
    if "ModuleNotFoundError" in done.stderr:
        raise NotRun(done.stderr.strip().splitlines()[-1])
    expect_equal(done.returncode, 0, f"exit status of the program ({done.stderr[-300:]})")
    return [tuple(json.loads(line)) for line in done.stdout.splitlines()]


ITEMS: tuple[Item, ...] = (listings, changes, copies, found_sessions, downloads, program)
