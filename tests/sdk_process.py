"""A process of the SDK, as tests judge it."""

import signal
import subprocess


def has_succeeded(ended: "subprocess.CompletedProcess[str]") -> bool:
    """Its exit status is 0. The SDK's native HTTP transport may also abort the process while the interpreter goes, after all is done and
    without a word; a failure of the SDK is told on standard error."""
    return ended.returncode == 0 or (ended.returncode == -signal.SIGABRT and not ended.stderr)
