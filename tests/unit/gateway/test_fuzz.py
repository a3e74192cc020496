"""Some hundreds of mutated requests at a whole server in this process; thousands at a real one are `tests/chaos/test_fuzz.py`."""

import random
from collections.abc import Iterator
from urllib.parse import urlsplit

import pytest

from tests.fakes import in_process
from tests.fakes.in_process import BASE, serve
from tests.fuzz.odds import BROKEN
from tests.fuzz.seeds import PARAMETERS, PREFIXES, REFUSED, SEEDS, furnished
from tests.fuzz.shots import Gun
from tests.fuzz.wire import Line, check
from tests.unit.gateway.test_tenants import ROUTES
from tinsmith.protocol.sessions import BaseModelInfo

NUM_SHOTS = 500


@pytest.fixture(scope="module")
def target(tiny_model: BaseModelInfo, tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Gun, Line]]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(in_process, "INFO", tiny_model.model_copy(update={"name": BASE}))
        with serve(tmp_path_factory.mktemp("root"), execution={"long_poll_s": 1}, gateway={"custom_losses": True}) as server:
            url = urlsplit(server.url)
            assert url.hostname is not None
            assert url.port is not None
            line = Line(url.hostname, url.port)
            yield Gun(furnished(line.host, line.port, BASE), random.Random(1)), line
            line.close()


def test_every_route_has_a_seed() -> None:
    """A new route of either face is told in `SEEDS` what a right request of it is."""
    routes = {route for route in ROUTES if route.split()[1].startswith(PREFIXES)}
    assert routes == set(SEEDS)
    assert {name for route in routes for name in ROUTES[route].param_convertors} <= set(PARAMETERS)


def test_the_seeds_are_right(target: tuple[Gun, Line]) -> None:
    """So that a mutation of one is refused for what was mutated."""
    gun, line = target
    for shot in gun.rights():
        answer = line.fire(shot)
        check(shot, answer)
        assert answer.is_refusal == (shot.route in REFUSED), (shot, answer.body[:500])


def test_mutated_requests_are_refused_in_form(target: tuple[Gun, Line]) -> None:
    gun, line = target
    num_refused = 0
    for shot in gun.shots(NUM_SHOTS):
        answer = line.fire(shot)
        check(shot, answer)
        num_refused += answer.is_refusal
    assert NUM_SHOTS / 2 < num_refused < NUM_SHOTS


def test_what_is_no_http_ends_its_connection_alone(target: tuple[Gun, Line]) -> None:
    gun, line = target
    for sent in BROKEN:
        assert b" 50" not in line.raw(sent)[:20], sent[:200]
    right = next(gun.rights())
    check(right, line.fire(right))
