"""`python -m runner.tune`."""

import sys

from runner.tune.command import main

if __name__ == "__main__":
    sys.exit(main())
