"""What the lessons of the 3xx series share: where their server is, and how they tell it from the command line.

The server is that of --base-url, else of TINKER_BASE_URL, else the one that `tinsmith serve` starts on this machine; the key that of
TINKER_API_KEY. A server without keys takes any key, but the SDK insists on one of a certain form.
"""

import argparse
import os

LOCAL_URL = "http://127.0.0.1:8700"
BASE_MODEL = "HuggingFaceTB/SmolLM2-135M-Instruct"
API_KEY = os.environ.get("TINKER_API_KEY", "tml-local")


def options(doc: str) -> argparse.ArgumentParser:
    """A parser that knows the server and the base model; `doc` is the lesson's docstring, whose first line it shows."""
    parser = argparse.ArgumentParser(description=doc.splitlines()[0])
    parser.add_argument("--base-url", default=os.environ.get("TINKER_BASE_URL", LOCAL_URL))
    parser.add_argument("--base-model", default=BASE_MODEL)
    return parser
