"""Runs items one after another and tells what came of each."""

import logging
from collections.abc import Iterable, Iterator
from dataclasses import replace

from tinsmith.conformance import credentials, faults, load, losses, old_clients, outages, rest, sampling, switches, training
from tinsmith.conformance.items import Item, Mismatch, NotRun, Target
from tinsmith.conformance.verdicts import Verdict

# Those that stop the server come last.
ITEMS: tuple[Item, ...] = (
    *training.ITEMS,
    *losses.ITEMS,
    *sampling.ITEMS,
    *rest.ITEMS,
    *faults.ITEMS,
    *credentials.ITEMS,
    *switches.ITEMS,
    *old_clients.ITEMS,
    *load.ITEMS,
    *outages.ITEMS,
)

_log = logging.getLogger(__name__)


def run(target: Target, items: Iterable[Item] = ITEMS) -> Iterator[Verdict]:
    for held in items:
        yield _run(target, held)


def _run(target: Target, held: Item) -> Verdict:
    target = replace(target, services=[])
    try:
        held.run(target)
    except NotRun as reason:
        return Verdict(held.number, held.title, "not run", _line(reason))
    except Mismatch as difference:
        return Verdict(held.number, held.title, "failed", _line(difference))
    except Exception as error:  # noqa: BLE001 (whatever a release of the SDK raises is a finding, not the end of the run)
        _log.info("item %s raised", held.number, exc_info=True)
        return Verdict(held.number, held.title, "failed", _line(f"{type(error).__name__}: {error}"))
    finally:
        target.close_services()
    return Verdict(held.number, held.title, "passed")


def _line(text: object) -> str:
    return " ".join(str(text).split())[:500]
