"""The lesson about crashes: it kills a trainer and a server of its own."""

from pathlib import Path

import yaml

from tests.integration.test_tinker_lessons import config, run, steps_of


def test_the_lesson_about_crashes_kills_a_trainer_and_a_server(tmp_path: Path) -> None:
    path = tmp_path / "server.yaml"
    path.write_text(yaml.safe_dump(config(tmp_path / "checkpoints")))
    output = run("304_resume_after_kill", ["--config", str(path)], {})
    assert steps_of(output) == [1, 2, 3]
    digests = [line for line in output.splitlines() if line.startswith("   weights ")]
    assert len(digests) == 3
    assert len(set(digests)) == 1
