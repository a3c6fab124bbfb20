"""What stands between the command line and a run: composition, checks, sweeps, help and the error screen."""
