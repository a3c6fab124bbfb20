"""Hydra's configuration groups, found as pkg://conf."""
