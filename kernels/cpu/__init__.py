"""The kernels of a CPU, compiled by numba. Each row is computed from its own start: its bits are its own.

They do what kernels/reference/ says, in one pass each; runner/engine/backend.py says where they run.
"""
