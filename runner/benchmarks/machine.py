"""What a measurement has to say about where it was made."""

from __future__ import annotations

import platform
from importlib.metadata import version
from typing import Any

from runner.tiny.manifest import processor_name
from runner.tracking.git_sha import git_sha


def describe_machine(*packages: str) -> dict[str, Any]:
    """CPU, versions of Python and of the packages, and the commit."""
    return {
        "cpu": processor_name(),
        "versions": {"python": platform.python_version(), **{package: version(package) for package in packages}},
        "commit": git_sha(),
    }
