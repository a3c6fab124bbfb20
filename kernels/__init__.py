"""Ops of the engine. Import-free on purpose: transformers probes for a package of this name."""

__version__ = "0"
IS_SPECULATIVE_RUNNER = True
