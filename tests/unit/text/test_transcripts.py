"""The text of a sampled sequence as its reader gets it."""

import pytest

from tinsmith.protocol.sessions import BaseModelInfo
from tinsmith.text.tokenizer import Tokenizer
from tinsmith.text.transcripts import Transcript


@pytest.fixture(scope="module")
def tokenizer(tiny_model: BaseModelInfo) -> Tokenizer:
    return Tokenizer.from_dir(tiny_model.path)


def pieces(transcript: Transcript, tokens: list[int]) -> list[str]:
    return [*map(transcript.push, tokens), transcript.end()]


def test_the_pieces_are_the_text_without_special_tokens(tokenizer: Tokenizer) -> None:
    text = "A duck 🦆, naïve as ever.\n" * 8
    tokens = tokenizer.encode(text + "<|im_end|>")
    assert "".join(pieces(Transcript(tokenizer), tokens)) == text


def test_a_special_token_that_belongs_to_the_text_is_kept(tokenizer: Tokenizer) -> None:
    tokens = tokenizer.encode("a<|im_end|>b<|im_start|>c")
    assert "".join(pieces(Transcript(tokenizer, kept=["<|im_end|>"]), tokens)) == "a<|im_end|>bc"


@pytest.mark.parametrize("stop", ["blue", " blue", "e, bl", "d"])
def test_a_text_ends_before_its_stop_string_wherever_tokens_divide_it(tokenizer: Tokenizer, stop: str) -> None:
    text = " white, blue, red"
    transcript = Transcript(tokenizer, [stop, "never"])
    assert "".join(pieces(transcript, tokenizer.encode(text))) == text[: text.index(stop)]
    assert transcript.is_stopped


def test_what_may_begin_a_stop_string_waits_and_is_told_once_it_does_not(tokenizer: Tokenizer) -> None:
    transcript = Transcript(tokenizer, [", blue"])
    told = pieces(transcript, tokenizer.encode(" white, red, b"))
    assert told == [" white", "", ", red", "", "", ", b"]
    assert not transcript.is_stopped


def test_no_stop_string_lies_around_a_special_token(tokenizer: Tokenizer) -> None:
    transcript = Transcript(tokenizer, ["ab"])
    assert "".join(pieces(transcript, tokenizer.encode("a<|im_end|>b"))) == "ab"
    assert not transcript.is_stopped


def test_half_a_character_at_the_end_is_shown_as_such(tokenizer: Tokenizer) -> None:
    tokens = tokenizer.encode("🦆")
    told = pieces(Transcript(tokenizer), tokens[:-1])
    assert told[:-1] == [""] * (len(tokens) - 1)
    assert set(told[-1]) == {"\ufffd"}


def test_the_size_is_where_the_next_token_begins(tokenizer: Tokenizer) -> None:
    transcript = Transcript(tokenizer, [", blue"])
    sizes = []
    for token in tokenizer.encode(" white, red"):
        sizes.append(transcript.size)
        transcript.push(token)
    assert sizes == [0, 6, 7]
    assert transcript.size == len(" white, red")


def test_the_prompt_decides_how_the_first_word_is_spaced() -> None:
    from tokenizers import Tokenizer as Fast
    from tokenizers import decoders, models, pre_tokenizers

    words = Fast(models.WordLevel({"▁red": 0, "▁blue": 1, "?": 2}, unk_token="?"))
    words.pre_tokenizer = pre_tokenizers.Metaspace()
    words.decoder = decoders.Metaspace()
    tokenizer = Tokenizer(words)
    assert "".join(pieces(Transcript(tokenizer), [1])) == "blue"
    assert "".join(pieces(Transcript(tokenizer, after=[0]), [1])) == " blue"
    assert tokenizer.token_text(1) == " blue"
