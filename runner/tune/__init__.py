"""Finds the number of speculative tokens for each load: `python -m runner.tune`."""
