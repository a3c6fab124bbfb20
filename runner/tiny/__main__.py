"""`python -m runner.tiny`: retrains the family."""

import sys

from runner.tiny.train import main

if __name__ == "__main__":
    try:
        main()
    except KeyboardInterrupt:  # a stage is saved when it has ended
        print("interrupted; stages that had ended are saved", file=sys.stderr)
        sys.exit(130)
