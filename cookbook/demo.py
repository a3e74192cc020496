"""The demo: starts a server of its own on a free port, runs lesson 101 against it, stops it.

`make demo` calls this after the installation and the download of the model. The exit code is that of the lesson.
"""

import os
import subprocess
import sys
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
CONFIG = ROOT / "configs" / "cpu.yaml"
LESSON = ROOT / "cookbook" / "101_sft.py"
STOP_S = 30  # the server promises 10

# The name of the base model is a hub id, so the SDK looks its tokenizer up in the hub's cache, which the server has filled. Without this
# variable it would ask the network first.
ENVIRONMENT = {**os.environ, "HF_HUB_OFFLINE": "1"}


def main() -> int:
    start = time.monotonic()
    server = subprocess.Popen(  # noqa: S603 - constant arguments, no shell
        [sys.executable, "-m", "tinsmith.cli", "serve", str(CONFIG), "--port", "0"],
        env=ENVIRONMENT,
        stdout=subprocess.PIPE,
        text=True,
        start_new_session=True,  # Ctrl-C reaches this script alone, which then stops the server in order
    )
    try:
        url = wait_until_ready(server)
        if url is None:
            print(f"the server ended with exit code {server.wait()} before it was ready; its messages are above", file=sys.stderr)
            return 1
        print(f"server: {url} after {time.monotonic() - start:.0f} s", flush=True)
        lesson = [sys.executable, str(LESSON), "--base-url", url]
        return subprocess.call(lesson, cwd=ROOT, env=ENVIRONMENT)  # noqa: S603 - constant arguments, no shell
    finally:
        stop(server)


def wait_until_ready(server: subprocess.Popen) -> str | None:
    """Pass the server's lines on until it says `ready URL`; None if it ends before."""
    for line in server.stdout:
        print(f"  {line}", end="", flush=True)
        if line.startswith("ready "):
            return line.split()[1]
    return None


def stop(server: subprocess.Popen) -> None:
    server.terminate()
    try:
        server.communicate(timeout=STOP_S)
    except subprocess.TimeoutExpired:
        server.kill()
        server.communicate()
        print(f"the server did not stop within {STOP_S} s and was killed", file=sys.stderr)


if __name__ == "__main__":
    sys.exit(main())
