"""Planted faults: small listed changes to the source, each of which a named test must notice. `harness.py` runs them."""
