"""Trace context for the headers of a request, where OpenTelemetry's API is installed; nothing otherwise.

Knows nothing of spans: the server's spans join whichever one is current when a call is made.
"""

from collections.abc import Callable, MutableMapping

Inject = Callable[[MutableMapping[str, str]], None]


def find_inject() -> Inject:
    """What adds `traceparent` to headers. Looked up when a client is made, so that importing the package stays cheap."""
    try:
        from opentelemetry.propagate import inject
    except ImportError:
        return _inject_nothing
    return inject


def _inject_nothing(_: MutableMapping[str, str]) -> None:
    """There is no trace to join."""
