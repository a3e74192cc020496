"""Resolves one base model in a process of its own: `python -m tinsmith.deployments.resolving [options] NAME`.

It may download and convert for minutes, while the process that starts the server starts Ray; it also puts the tokenizer where clients on
this machine look it up. Prints a `ServedModel` as one line of JSON; a source that cannot be had is one line on stderr. PyTorch is imported
by name, and only for the probe of dtype "auto": its import takes longer than all else here.
"""

import argparse
import importlib
import sys
from typing import Literal, cast

from tinsmith.config import cache_dir
from tinsmith.deployments.base_models import EXIT_NO_SOURCE, WARNING, ServedModel
from tinsmith.engines.models import ModelSourceError, fill_hub_cache, resolve
from tinsmith.protocol.sessions import BaseModelInfo

Compute = Literal["fp32", "bf16"]


def fastest_dtype(device: str) -> Compute:
    return cast(Compute, importlib.import_module("tinsmith.engines.peft_engine").fastest_dtype(device))


def _fill_hub_cache(info: BaseModelInfo) -> None:
    """A server can do without; its clients then need the hub."""
    try:
        fill_hub_cache(info)
    except OSError as error:
        print(f"{WARNING}the tokenizer of {info.name} cannot be put into the hub's cache ({error}); clients need the hub", file=sys.stderr)


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="tinsmith.deployments.resolving")
    parser.add_argument("name")
    parser.add_argument("--source", default=None)
    parser.add_argument("--dtype", choices=("auto", "fp32", "bf16"), default="fp32")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    asked = parser.parse_args(arguments)
    try:
        info = resolve(asked.source, asked.name, cache_dir())
        _fill_hub_cache(info)
    except ModelSourceError as error:
        print(error, file=sys.stderr)
        return EXIT_NO_SOURCE
    dtype = fastest_dtype(asked.device) if asked.dtype == "auto" else asked.dtype
    print(ServedModel(info=info, dtype=dtype).model_dump_json())
    return 0


if __name__ == "__main__":
    sys.exit(main())
