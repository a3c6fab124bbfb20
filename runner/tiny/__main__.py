"""`python -m runner.tiny`: retrains the family, as `python -m runner.tiny.train` does."""

from runner.tiny.train import main

if __name__ == "__main__":
    main()
