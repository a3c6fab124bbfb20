"""`python -m runner.train`."""

import sys

from runner.train.command import main

if __name__ == "__main__":
    sys.exit(main())
