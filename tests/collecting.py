"""Collects garbage where nobody minds what it finds.

A connection that a client, or a server that was stopped with requests under way, left to the collector warns as it goes, and a warning
is an error of whichever test runs then.
"""

import gc
import warnings


def collect_quietly() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ResourceWarning)
        gc.collect()
