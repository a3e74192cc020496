"""The lesson about agents against SmolLM2: a tiny random model learns a few texts, but not to call a tool."""

import os
import subprocess
import sys
from pathlib import Path

from tests.e2e.conftest import Stack

LESSON = Path(__file__).resolve().parents[2] / "cookbook" / "305_openai_agent.py"
LESSON_S = 240.0


def test_the_agent_learns_to_call_its_tool_and_says_what_it_answers(stack: Stack) -> None:
    command = [sys.executable, str(LESSON), "--base-url", stack.server.url, "--fruits", "1", "--steps", "6"]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=LESSON_S, check=False, env=os.environ | {"HF_HUB_OFFLINE": "1"})
    assert ended.returncode == 0, ended.stdout[-2000:] + ended.stderr[-4000:]
    assert [line[0] for line in ended.stdout.splitlines() if line[:1].isdigit()] == ["1", "2", "3", "4"]
    assert "We have 12 apples." in ended.stdout
