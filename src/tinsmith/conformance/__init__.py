"""The compatibility list of the Tinker wire, run with an SDK against any server that speaks it.

Knows the SDK, numpy and the standard library, and nothing of Tinsmith's server: a release of the SDK runs it from an environment of its
own, with this package on its path. The numbers of the items are those of docs/conformance.md.
"""
