"""Item 23: each switch of the client configuration flipped alone, then all of them, on items 4 and 10."""

from collections.abc import Callable

from tinsmith.conformance import sampling, training
from tinsmith.conformance.items import Item, NotRun, Target, expect, faulty, item
from tinsmith.conformance.proxy import Proxy, Rule

NUM_DATUMS = 250
CHUNK_LEN = 100  # in place of the server's, so that few datums make three chunks


@item("23a", "with compressed uploads the other way round")
def compression(target: Target) -> None:
    def check(proxy: Proxy, was_on: bool) -> None:
        has_zstd = any(post.headers.get("content-encoding") == "zstd" for post in proxy.seen("forward_backward"))
        expect(has_zstd != was_on, f"uploads were {'not ' * was_on}compressed although the switch says otherwise")

    _flipped(target, "proto_compress_fwdbwd", default=False, check=check)


@item("23b", "with the other HTTP stack")
def transport(target: Target) -> None:
    _flipped(target, "use_pyqwest_transport", default=True)


@item("23c", "with the session poller the other way round")
def poller(target: Target) -> None:
    def check(proxy: Proxy, was_on: bool) -> None:
        expect(bool(proxy.seen("retrieve_futures")) != was_on, f"retrieve_futures was {'' if was_on else 'not '}called")

    _flipped(target, "sample_use_retrieve_futures", default=False, check=check)


@item("23d", "with parallel chunks the other way round")
def parallel_chunks(target: Target) -> None:
    _flipped(target, "parallel_fwdbwd_chunks", default=True)


@item("23e", "without metadata-only answers")
def metadata_only(target: Target) -> None:
    with faulty(target) as (proxy, through):
        proxy.change_config(fwdbwd_max_chunk_len=CHUNK_LEN)
        proxy.add(_whole_answers())
        _check(through)


@item("23f", "with the key itself in place of tokens")
def tokens(target: Target) -> None:
    _flipped(target, "pjwt_auth_enabled", default=False, only_where_on=True)


@item("23g", "with all switches the other way round")
def everything(target: Target) -> None:
    with faulty(target) as (proxy, through):

        def flip(config: dict[str, object]) -> dict[str, object]:
            flipped: dict[str, object] = {name: not config.get(name, default) for name, default in _DEFAULTS.items()}
            return config | flipped | {"fwdbwd_max_chunk_len": CHUNK_LEN, "pjwt_auth_enabled": False}

        proxy.add(Rule("client/config", None, change_answer=flip))
        proxy.add(_whole_answers())
        _check(through)


_DEFAULTS = {
    "proto_compress_fwdbwd": False,
    "use_pyqwest_transport": True,
    "sample_use_retrieve_futures": False,
    "parallel_fwdbwd_chunks": True,
}


def _flipped(
    target: Target, flag: str, *, default: bool, only_where_on: bool = False, check: Callable[[Proxy, bool], None] | None = None
) -> None:
    """Run the items with a flag that is not what the server says. `default`: of the SDK, where the server says nothing."""
    with faulty(target) as (proxy, through):
        said: list[bool] = []

        def flip(config: dict[str, object]) -> dict[str, object]:
            said.append(bool(config.get(flag, default)))
            return config | {flag: not said[-1], "fwdbwd_max_chunk_len": CHUNK_LEN}

        proxy.add(Rule("client/config", None, change_answer=flip))
        through.service().holder.get_client_config()  # the SDK asks for it when it is first needed
        if only_where_on and not said[0]:
            raise NotRun(f"the server has {flag} off, and cannot do it")
        _check(through)
        if check is not None:
            check(proxy, said[0])


def _whole_answers() -> Rule:
    return Rule("retrieve_future", None, change_request=lambda asked: asked | {"allow_metadata_only": False})


def _check(through: Target) -> None:
    training.check_chunks(through, NUM_DATUMS)
    sampling.samples.run(through)
    sampling.scores.run(through)


ITEMS: tuple[Item, ...] = (compression, transport, poller, parallel_chunks, metadata_only, tokens, everything)
