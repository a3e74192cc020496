"""The native protocol under generated requests: what /openapi.json says is what a running server does."""

import subprocess
import sys
from pathlib import Path

import pytest

from tests.fakes.in_process import BASE, serve

FAKE = {"name": BASE, "trainer": {"engine": "fake"}, "sampler": {"engine": "fake"}}
# A body over a bound of its bytes is 413 before anybody looks at its fields.
SETTINGS = """
[checks]
positive_data_acceptance.enabled = false
negative_data_rejection.expected-statuses = [400, 401, 403, 404, 405, 406, 409, 413, 415, 422, 428, 429, 501]
not_a_server_error.expected-statuses = ["2xx", "3xx", "4xx", 501]
"""


@pytest.mark.timeout(900)
@pytest.mark.proves("R38", "R42", "R48", "R49")
def test_generated_requests_find_nothing_but_what_the_document_says(tmp_path: Path):
    settings = tmp_path / "schemathesis.toml"
    settings.write_text(SETTINGS)
    with serve(tmp_path / "checkpoints", models=[FAKE], execution={"long_poll_s": 1}) as server:
        program = str(Path(sys.executable).with_name("st"))
        options = ["--max-examples=2", "--seed=1", "--no-color", "--suppress-health-check=all"]
        command = [program, f"--config-file={settings}", "run", f"{server.url}/openapi.json", *options]
        run = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False, timeout=600)
    report = "\n".join(line[:300] for line in run.stdout.splitlines()[-150:])
    assert run.returncode == 0, report
