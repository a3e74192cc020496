"""What of the model sources needs PyTorch and transformers: `python -m tinsmith.engines.conversion gguf FILE DIRECTORY | facts DIRECTORY`.

A process of its own, since it takes gigabytes for a moment and seconds to import. `models` calls it and says where things lie.
"""

import argparse
import json
from pathlib import Path

import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, LlamaConfig, LlamaForCausalLM

from tinsmith.engines.models import TOKENIZER_FILES, ModelFacts, build_once, copy_files, describe


def write_tiny_model(directory: Path, tokenizer_source: Path) -> None:
    """Write a random Llama for tests once: 2 layers, hidden 64, 4 heads, 2 KV heads, seed 0, fp32, tied embeddings.

    Its tokenizer and vocabulary are those of the model directory `tokenizer_source`. Does nothing where `directory` exists.
    """
    build_once(directory, lambda target: _write_tiny_model(target, tokenizer_source))


def facts_of(directory: Path) -> ModelFacts:
    """As transformers reads config.json, defaults of the model's class included. Raises OSError, ValueError."""
    config = AutoConfig.from_pretrained(directory).get_text_config()
    return ModelFacts(
        max_position_embeddings=config.max_position_embeddings, vocab_size=config.vocab_size, eos_token_id=config.eos_token_id
    )


def convert_gguf(gguf: Path, target: Path) -> None:
    """Dequantise into safetensors. float32, since the dequantised values are not exact in bf16; an engine casts when it loads.

    The loaded model still carries a quantization_config, with which it cannot be saved: it is rebuilt without.
    """
    tokenizer = AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name)
    loaded = AutoModelForCausalLM.from_pretrained(gguf.parent, gguf_file=gguf.name, dtype=torch.float32)
    settings = loaded.config.to_dict()
    settings.pop("quantization_config", None)
    model = LlamaForCausalLM(LlamaConfig(**settings))
    model.load_state_dict(loaded.state_dict(), strict=True)
    model.tie_weights()
    model.generation_config = loaded.generation_config
    model.save_pretrained(target)
    tokenizer.save_pretrained(target)
    _settle_tokenizer_config(target / "tokenizer_config.json", settings["max_position_embeddings"])


def _settle_tokenizer_config(path: Path, max_context: int) -> None:
    """Name a tokenizer class that older releases of transformers know too, and the real length limit."""
    settings = json.loads(path.read_text())
    for key in ("backend", "is_local", "local_files_only"):
        settings.pop(key, None)
    settings |= {"tokenizer_class": "PreTrainedTokenizerFast", "model_max_length": max_context}
    path.write_text(json.dumps(settings, indent=2, sort_keys=True) + "\n")


def _write_tiny_model(target: Path, tokenizer_source: Path) -> None:
    tokens = describe("tokenizer", tokenizer_source)
    config = LlamaConfig(
        vocab_size=tokens.vocab_size,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=2048,
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=list(tokens.eos_token_ids),
        pad_token_id=None,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = LlamaForCausalLM(config)
    model.save_pretrained(target)
    weights_apart = ("config.json", "generation_config.json")
    copy_files(
        [tokenizer_source / file for file in TOKENIZER_FILES if file not in weights_apart and (tokenizer_source / file).is_file()], target
    )


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog=__spec__.name if __spec__ else None)
    verbs = parser.add_subparsers(dest="verb", required=True)
    gguf = verbs.add_parser("gguf", help="dequantise a GGUF file into a safetensors directory")
    gguf.add_argument("file", type=Path)
    gguf.add_argument("directory", type=Path)
    facts = verbs.add_parser("facts", help="print what config.json says, as JSON")
    facts.add_argument("directory", type=Path)
    asked = parser.parse_args(arguments)
    if asked.verb == "gguf":
        convert_gguf(asked.file, asked.directory)
    else:
        print(facts_of(asked.directory).model_dump_json())
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
