"""Stop rules: which token ends a sequence."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tinsmith.protocol.sessions import BaseModelInfo
from tinsmith.text.stops import Stop, StopMatcher
from tinsmith.text.tokenizer import Tokenizer

EOS = 2


@pytest.fixture(scope="module")
def tokenizer(tiny_model: BaseModelInfo) -> Tokenizer:
    return Tokenizer.from_dir(tiny_model.path)


def stopped_at(stop: Stop, tokens: list[int], tokenizer: Tokenizer | None = None) -> int | None:
    """Index of the token that ends the sequence."""
    matcher = StopMatcher(stop, (EOS,), tokenizer)
    return next((index for index, token in enumerate(tokens) if matcher.push(token)), None)


def test_none_stops_at_the_end_of_sequence() -> None:
    assert stopped_at(None, [5, 6, EOS, 7]) == 2


def test_empty_stops_never() -> None:
    assert stopped_at((), [5, EOS, EOS, 7]) is None


def test_token_ids_stop_and_so_does_the_end_of_sequence() -> None:
    assert stopped_at((9, 6), [5, 6, 9]) == 1
    assert stopped_at((9,), [5, EOS, 9]) == 1


@pytest.mark.parametrize("stop", ["END", "over the", " lazy d", "\n\n", "jumps"])
def test_a_string_ends_with_the_token_that_completes_it(tokenizer: Tokenizer, stop: str) -> None:
    tokens = tokenizer.encode("The quick fox jumps over the lazy dog.\n\nTHE END of it")
    at = stopped_at((stop,), tokens, tokenizer)
    assert at is not None
    assert stop in tokenizer.decode(tokens[: at + 1])
    assert stop not in tokenizer.decode(tokens[:at])


def test_a_string_may_span_many_tokens(tokenizer: Tokenizer) -> None:
    tokens = [tokenizer.encode(letter)[0] for letter in "xxabcabcabdyy"]
    assert len(tokens) == 13, "the test needs one token a letter"
    assert stopped_at(("abcabd",), tokens, tokenizer) == 10


def test_characters_split_over_tokens_match(tokenizer: Tokenizer) -> None:
    text = "日本語🏳️‍🌈𝔘 tail"
    tokens = tokenizer.encode(text)
    at = stopped_at(("𝔘",), tokens, tokenizer)
    assert at is not None
    assert tokenizer.decode(tokens[: at + 1]) == "日本語🏳️‍🌈𝔘"


def test_the_first_of_several_strings_wins(tokenizer: Tokenizer) -> None:
    tokens = tokenizer.encode("one two three four")
    at = stopped_at(("four", "two"), tokens, tokenizer)
    assert tokenizer.decode(tokens[: (at or 0) + 1]) == "one two"


def test_strings_keep_the_end_of_sequence(tokenizer: Tokenizer) -> None:
    assert stopped_at(("zzz",), [*tokenizer.encode("hello"), EOS], tokenizer) == len(tokenizer.encode("hello"))


def test_special_tokens_match_as_text(tokenizer: Tokenizer) -> None:
    tokens = [*tokenizer.encode("hi"), *tokenizer.encode("<|im_start|>")]
    assert stopped_at(("<|im_start|>",), tokens, tokenizer) == len(tokens) - 1


def test_strings_need_a_tokenizer_and_text(tokenizer: Tokenizer) -> None:
    with pytest.raises(ValueError, match="need a tokenizer"):
        StopMatcher(("x",), (), None)
    with pytest.raises(ValueError, match="empty stop string"):
        StopMatcher(("",), (), tokenizer)


def undecided_after(stop: tuple[str, ...], tokens: list[int], tokenizer: Tokenizer) -> list[int]:
    """How many tokens are undecided after each token."""
    matcher = StopMatcher(stop, (EOS,), tokenizer)
    undecided = []
    for token in tokens:
        assert not matcher.push(token)
        undecided.append(matcher.num_undecided())
    return undecided


def test_tokens_whose_text_begins_a_stop_string_are_undecided(tokenizer: Tokenizer) -> None:
    tokens = [tokenizer.encode(letter)[0] for letter in "xabxabcy"]
    assert undecided_after(("abcd", "bxq"), tokens, tokenizer) == [0, 1, 2, 2, 1, 2, 3, 0]


def test_without_stop_strings_everything_is_decided() -> None:
    matcher = StopMatcher((7,), (EOS,), None)
    assert not matcher.push(5)
    assert matcher.num_undecided() == 0


def test_an_incomplete_character_is_undecided(tokenizer: Tokenizer) -> None:
    tokens = tokenizer.encode("𝔘")
    assert len(tokens) > 1, "the test needs a character of several tokens"
    undecided = undecided_after(("zz",), [*tokens, *tokenizer.encode("a")], tokenizer)
    assert undecided == [*range(1, len(tokens)), 0, 0]


@given(pieces=st.lists(st.sampled_from(["a", "b", "ab", "é", "日", "𝔘", " a", "ba"]), min_size=1, max_size=12), stop=st.data())
def test_nothing_of_a_stop_string_is_decided_before_it_matches(tokenizer: Tokenizer, pieces: list[str], stop: st.DataObject) -> None:
    tokens = [token for piece in pieces for token in tokenizer.encode(piece)]
    text = tokenizer.decode(tokens)
    start = stop.draw(st.integers(0, len(text) - 1))
    string = text[start : stop.draw(st.integers(start + 1, len(text)))]
    matcher = StopMatcher((string,), (EOS,), tokenizer)
    num_decided = 0
    for index, token in enumerate(tokens):
        if matcher.push(token):
            break
        now_decided = index + 1 - matcher.num_undecided()
        assert now_decided >= num_decided, "what was decided stays so"
        num_decided = now_decided
    decided = tokenizer.decode(tokens[:num_decided])
    assert len(decided) <= text.index(string)
