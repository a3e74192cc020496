"""Writes a generated file, or says with --check that it is stale. Knows nothing of what is generated."""

import argparse
import sys
from pathlib import Path


def publish(path: Path, text: str, remedy: str, faults: list[str] | None = None) -> int:
    """Without arguments write the file; with --check write nothing, and answer 1 if it is stale or anything is at fault."""
    parser = argparse.ArgumentParser(description=f"Write {path.name}.")
    parser.add_argument("--check", action="store_true", help="write nothing; exit 1 if the file is stale")
    if not parser.parse_args().check:
        path.write_text(text)
        return 0
    found = list(faults or ())
    if not path.is_file() or path.read_text() != text:
        found.append(f"{path.name} is stale; run: {remedy}")
    for fault in found:
        print(fault, file=sys.stderr)
    return 1 if found else 0
