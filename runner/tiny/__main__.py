"""`python -m runner.tiny`: retrains the family."""

from runner.tiny.train import main

if __name__ == "__main__":
    main()
