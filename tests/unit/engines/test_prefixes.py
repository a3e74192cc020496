"""What names the beginning of a prompt, and how much of it is kept."""

from array import array

from tinsmith.engines.prefixes import PREFILL_CHUNK, PrefixCache, chunk_keys, digest_of, root


def keys(num_tokens: int, *, first: int = 0, scope: str = "", adapter: bytes = b"") -> list[bytes]:
    tokens = array("i", [first, *range(1, num_tokens)])
    return list(chunk_keys(root(scope, adapter), tokens.tobytes()))


def test_each_whole_chunk_has_a_name_that_depends_on_all_before_it() -> None:
    assert [len(keys(num)) for num in (1, PREFILL_CHUNK - 1, PREFILL_CHUNK, 2 * PREFILL_CHUNK + 1)] == [0, 0, 1, 2]
    long, short = keys(3 * PREFILL_CHUNK), keys(2 * PREFILL_CHUNK + 5)
    assert long[:2] == short
    assert len({*long, *keys(3 * PREFILL_CHUNK, first=7)}) == 6


def test_scopes_and_adapters_share_no_names() -> None:
    names = [
        keys(PREFILL_CHUNK, scope=scope, adapter=adapter)[0]
        for scope, adapter in [("", b""), ("a", b""), ("", b"a"), ("b", b""), ("ab", b"c"), ("a", b"bc")]
    ]
    assert len(set(names)) == len(names)


def test_adapters_are_told_apart_by_their_contents() -> None:
    assert digest_of({"a": b"1", "b": b"2"}) == digest_of({"b": b"2", "a": b"1"})
    assert len({digest_of(files) for files in ({"a": b"1"}, {"a": b"2"}, {"b": b"1"}, {"a": b"1", "b": b""})}) == 4


def test_the_least_recently_used_chunk_makes_room() -> None:
    cache: PrefixCache[str] = PrefixCache(10)
    cache.put(b"a", "A", 4)
    cache.put(b"b", "B", 4)
    assert cache.get(b"a") == "A"
    cache.put(b"c", "C", 4)
    assert [cache.get(key) for key in (b"a", b"b", b"c")] == ["A", None, "C"]
    assert cache.num_bytes == 8
    cache.put(b"huge", "H", 11)
    assert cache.get(b"huge") is None
    assert cache.get(b"a") == "A", "what cannot stay evicts nothing"


def test_a_name_keeps_its_content_and_its_size() -> None:
    cache: PrefixCache[str] = PrefixCache(10)
    cache.put(b"a", "A", 4)
    cache.put(b"a", "other", 9)
    assert (cache.get(b"a"), cache.num_bytes) == ("A", 4)


def test_no_bytes_hold_nothing() -> None:
    cache: PrefixCache[str] = PrefixCache(0)
    cache.put(b"a", "A", 1)
    assert cache.get(b"a") is None
