"""One module for each op that `python -m kernels.benchmark` checks and times, named as its kernel's."""
