"""What an item of the list is, what it is given, and how it says that a server differs."""

import contextlib
import inspect
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from importlib.metadata import version
from typing import Any

import tinker

from tinsmith.conformance.local import LocalServer
from tinsmith.conformance.proxy import Proxy

WITHIN_S = 120.0  # of one answer
CLOSE_S = 10.0


class Mismatch(Exception):
    """The server does not do what the wire asks; the message is one line: what was expected, what came."""


class NotRun(Exception):
    """The item cannot be run here; the message says why."""


@dataclass(frozen=True, slots=True)
class Target:
    """The server under test, and one base model of it that can be trained and sampled. `vocab_size` bounds the token ids that are sent.

    `revoked_key`: one that is no longer accepted. `server`: where the run started the server itself, whose sessions then end after
    `session_timeout_s` of silence. Items that need what is None are not run.
    """

    base_url: str
    api_key: str
    model: str
    vocab_size: int
    revoked_key: str | None = None
    server: LocalServer | None = None
    session_timeout_s: float | None = None
    services: list[tinker.ServiceClient] = field(default_factory=list, compare=False, repr=False)

    def service(self, **options: object) -> tinker.ServiceClient:
        """A client of its own session, which `close_services` ends."""
        made = tinker.ServiceClient(base_url=self.base_url, api_key=self.api_key, **options)  # type: ignore[arg-type]
        self.services.append(made)
        return made

    def close_services(self) -> None:
        """End the sessions that were opened, and so free what they hold on the server; where the release can, and as far as it goes."""
        while self.services:
            service = self.services.pop()
            if hasattr(service, "close"):
                with contextlib.suppress(Exception):
                    service.close("success").result(CLOSE_S)

    def trainer(self, service: tinker.ServiceClient, rank: int = 8) -> tinker.TrainingClient:
        """A fresh adapter, the same at each call."""
        made: tinker.TrainingClient = client(service.create_lora_training_client(self.model, rank=rank, seed=7))
        return made

    def sampler(self, service: tinker.ServiceClient) -> tinker.SamplingClient:
        """Of the base model."""
        made: tinker.SamplingClient = client(service.create_sampling_client(base_model=self.model))
        return made


Run = Callable[[Target], None]


@dataclass(frozen=True, slots=True)
class Item:
    """`number` is the list's, with a letter where one entry of it is several items."""

    number: str
    title: str
    run: Run


def item(number: str, title: str) -> Callable[[Run], Item]:
    """Make a function an item. It returns where the server conforms, and raises Mismatch or NotRun."""
    return lambda run: Item(number, title, run)


def expect(condition: object, message: str) -> None:
    """Raises Mismatch."""
    if not condition:
        raise Mismatch(message)


def expect_equal(got: object, wanted: object, what: str) -> None:
    """Raises Mismatch."""
    expect(got == wanted, f"{what}: expected {wanted!r}, got {got!r}")


def client(made: Any) -> Any:
    """What a release makes at once, and a newer one promises. Raises TimeoutError."""
    return made.result(WITHIN_S) if callable(getattr(made, "result", None)) else made


@contextlib.contextmanager
def faulty(target: Target) -> Iterator[tuple[Proxy, Target]]:
    """A proxy before the server, and the server as it is seen through it. Raises NotRun for releases whose reactions are not listed."""
    needs_release(0, 38)
    with Proxy(target.base_url) as proxy:
        through = replace(target, base_url=proxy.url, services=[])
        try:
            yield proxy, through
        finally:
            proxy.clear()
            through.close_services()


def answer(future: Any) -> Any:
    """The result of a promise of any release. Raises what it raises, and TimeoutError."""
    return future.result(timeout=WITHIN_S)


def failure(future: Any) -> tinker.RequestFailedError:
    """The failure of a promise that must fail. Raises Mismatch where it does not."""
    try:
        got = answer(future)
    except tinker.RequestFailedError as error:
        return error
    raise Mismatch(f"expected a RequestFailedError, got {str(got)[:200]}")


def needs(owner: object, *names: str) -> None:
    """Raises NotRun where this release of the SDK has no method of one of these names."""
    missing = [name for name in names if not hasattr(owner, name)]
    if missing:
        raise NotRun(f"this SDK has no {', '.join(missing)}")


def needs_option(function: Callable[..., object], name: str) -> None:
    """Raises NotRun where this release's function takes no such argument."""
    if name not in inspect.signature(function).parameters:
        raise NotRun(f"this SDK's {function.__name__} takes no {name}")


def is_release(*wanted: int) -> bool:
    """Whether the SDK is of this release or newer."""
    return tuple(int(part) for part in version("tinker").split(".")[:2]) >= wanted


def needs_release(*wanted: int) -> None:
    """Raises NotRun for older releases of the SDK."""
    if not is_release(*wanted):
        raise NotRun(f"for SDK {'.'.join(map(str, wanted))} and newer; this is {version('tinker')}")


def category(error: tinker.RequestFailedError) -> str:
    """Of a failed future: user, server or unknown."""
    return str(getattr(error.category, "value", error.category))


def until(condition: Callable[[], bool], within_s: float, what: str) -> None:
    """Wait for what no answer tells of. Raises Mismatch."""
    deadline = time.monotonic() + within_s
    while not condition():
        expect(time.monotonic() < deadline, f"{what}: not within {within_s:.0f} s")
        time.sleep(0.1)
