"""`python -m runner.train`: a draft head for a target of your own; see runner/train/command.py."""
