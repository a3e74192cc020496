"""Request ids, model ids and names."""

import pytest

from tinsmith.protocol.errors import ValidationFailed
from tinsmith.protocol.ids import WorkKind, check_name, model_id, parse_request_id, request_id, sampling_session_id

SECRET = b"secret"


def make(**changes: object) -> str:
    fields: dict[str, object] = {"epoch": "0123abcd", "secret": SECRET, "tenant": "a", "lane": "s:train:0", "seq": 1}
    return request_id(WorkKind.TRAINING, **(fields | changes))  # type: ignore[arg-type]


@pytest.mark.proves("R31")
def test_a_repeat_finds_the_first_id():
    assert make() == make()


def test_every_part_of_the_natural_key_counts():
    assert len({make(), make(seq=2), make(lane="s:train:1"), make(secret=b"other"), make(epoch="0123abce"), make(tenant="b")}) == 6


def test_an_id_tells_kind_and_epoch_and_whose_it_is():
    parsed = parse_request_id(make(), secret=SECRET, tenant="a")
    assert parsed is not None
    assert (parsed.text, parsed.work, parsed.epoch, parsed.is_genuine) == (make(), WorkKind.TRAINING, "0123abcd", True)
    foreign = parse_request_id(make(), secret=SECRET, tenant="b")
    assert foreign is not None
    assert not foreign.is_genuine


@pytest.mark.parametrize("text", ["", "t", make()[:-1], make() + "0", "x" + make()[1:], make().upper(), make() + "\n"])
def test_malformed_ids_are_none(text):
    assert parse_request_id(text, secret=SECRET, tenant="a") is None


def test_a_forged_id_is_not_genuine():
    forged = make()[:-1] + ("0" if make()[-1] != "0" else "1")
    parsed = parse_request_id(forged, secret=SECRET, tenant="a")
    assert parsed is not None
    assert not parsed.is_genuine


def test_derived_names():
    assert model_id("s", 2) == "s:train:2"
    assert sampling_session_id("s", 2) == "s:sample:2"


@pytest.mark.parametrize("name", ["a", "A.b_c-1", "0" * 128])
def test_good_names(name):
    assert check_name(name, "path") == name


@pytest.mark.parametrize("name", ["", ".a", "-a", "a/b", "a..b", "a b", "0" * 129, "ä", "a\n", "../a"])
def test_bad_names_are_refused_with_the_field(name):
    with pytest.raises(ValidationFailed, match=r"path: .*letters, digits"):
        check_name(name, "path")
