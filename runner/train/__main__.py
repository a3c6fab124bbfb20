"""`python -m runner.train`."""

import sys

from runner.cli.termination import ends_without_a_word

with ends_without_a_word():
    from runner.train.command import main

if __name__ == "__main__":
    sys.exit(main())
