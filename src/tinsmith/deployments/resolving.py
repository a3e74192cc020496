"""Resolves one base model in a process of its own: `python -m tinsmith.deployments.resolving [options] NAME`.

The conversion of a model needs PyTorch and for a moment gigabytes of memory; the process that starts the server needs neither and starts
Ray meanwhile. Prints a `ServedModel` as one line of JSON; a source that cannot be had is one line on stderr.
"""

import argparse
import sys
from typing import Literal

from tinsmith.config import cache_dir
from tinsmith.deployments.base_models import EXIT_NO_SOURCE, ServedModel
from tinsmith.engines.models import ModelSourceError, fill_hub_cache, resolve
from tinsmith.engines.peft_engine import fastest_dtype


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="tinsmith.deployments.resolving")
    parser.add_argument("name")
    parser.add_argument("--source", default=None)
    parser.add_argument("--dtype", choices=("auto", "fp32", "bf16"), default="fp32")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--fill-hub-cache", action="store_true")
    asked = parser.parse_args(arguments)
    try:
        info = resolve(asked.source, asked.name, cache_dir())
        if asked.fill_hub_cache:
            fill_hub_cache(info)
    except ModelSourceError as error:
        print(error, file=sys.stderr)
        return EXIT_NO_SOURCE
    dtype: Literal["fp32", "bf16"] = fastest_dtype(asked.device) if asked.dtype == "auto" else asked.dtype
    print(ServedModel(info=info, dtype=dtype).model_dump_json())
    return 0


if __name__ == "__main__":
    sys.exit(main())
