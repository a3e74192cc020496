"""Decoding token by token gives the text of the whole, whatever the tokens are."""

import random
from pathlib import Path

import pytest
from tokenizers import Tokenizer as FastTokenizer
from tokenizers import models, pre_tokenizers

from tinsmith.protocol.sessions import BaseModelInfo
from tinsmith.text.tokenizer import Tokenizer

MULTI_BYTE = "naïve 日本語 🤗🏳️‍🌈 Ω𝔘 ok\n"


@pytest.fixture(scope="module")
def tokenizer(tiny_model: BaseModelInfo) -> Tokenizer:
    return Tokenizer.from_dir(tiny_model.path)


def streamed(tokenizer: Tokenizer, tokens: list[int]) -> list[str]:
    stream = tokenizer.stream()
    return [stream.push(token) for token in tokens]


def test_encode_and_decode_are_inverse(tokenizer: Tokenizer) -> None:
    assert tokenizer.decode(tokenizer.encode(MULTI_BYTE)) == MULTI_BYTE
    assert tokenizer.vocab_size == 49152


def test_special_tokens_are_kept_unless_asked(tokenizer: Tokenizer) -> None:
    tokens = tokenizer.encode("<|im_start|>hi<|im_end|>")
    assert tokenizer.decode(tokens) == "<|im_start|>hi<|im_end|>"
    assert tokenizer.decode(tokens, skip_special_tokens=True) == "hi"


def test_control_tokens_are_the_special_ones(tokenizer: Tokenizer) -> None:
    assert {"<|im_start|>", "<|im_end|>", "<|endoftext|>"} <= set(tokenizer.control_tokens())
    assert all(len(tokenizer.encode(token)) == 1 for token in tokenizer.control_tokens())


def test_no_token_stands_for_more_characters_than_the_longest(tokenizer: Tokenizer) -> None:
    assert len(tokenizer.encode("#" * 80)) == 1
    assert 80 <= tokenizer.longest_token() <= 100


def test_a_text_that_goes_on_has_no_mark_of_a_beginning(tokenizer: Tokenizer) -> None:
    assert tokenizer.encode_on("word") == tokenizer.encode("word")
    characters = ["Ġ", "Ċ", "w", "o", "r", "d"]
    marking = FastTokenizer(models.BPE({character: place for place, character in enumerate(characters)}, []))
    marking.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=True)
    assert Tokenizer(marking).encode("word") == [0, 2, 3, 4, 5]
    assert Tokenizer(marking).encode_on("word") == [2, 3, 4, 5]


def test_a_directory_without_a_tokenizer_is_refused(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match=r"needs a tokenizer\.json"):
        Tokenizer.from_dir(tmp_path)


def test_a_character_split_over_tokens_appears_when_it_is_complete(tokenizer: Tokenizer) -> None:
    tokens = tokenizer.encode("𝔘")
    assert len(tokens) > 1, "the test needs a character that is several tokens"
    assert streamed(tokenizer, tokens) == [""] * (len(tokens) - 1) + ["𝔘"]


@pytest.mark.parametrize("repeats", [1, 30])
def test_pieces_join_to_the_whole(tokenizer: Tokenizer, repeats: int) -> None:
    tokens = tokenizer.encode(MULTI_BYTE * repeats)
    assert "".join(streamed(tokenizer, tokens)) == MULTI_BYTE * repeats


def test_broken_bytes_do_not_hold_back_what_follows(tokenizer: Tokenizer) -> None:
    first_byte_only = tokenizer.encode("𝔘")[:1]
    tokens = first_byte_only * 40 + tokenizer.encode("after")
    pieces = streamed(tokenizer, tokens)
    assert "".join(pieces).endswith("after")
    assert any("\ufffd" in piece for piece in pieces[:40]), "a run of broken bytes is handed out as it goes"


def test_random_tokens_stream_like_the_whole(tokenizer: Tokenizer) -> None:
    random_tokens = random.Random(1)
    for _ in range(20):
        tokens = [random_tokens.randrange(tokenizer.vocab_size) for _ in range(60)]
        whole = tokenizer.decode(tokens)
        assert whole.startswith("".join(streamed(tokenizer, tokens)))
