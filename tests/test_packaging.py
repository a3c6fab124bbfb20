"""What pip reads: the ranges, the exact versions CI installs, and the command that comes with them."""

from __future__ import annotations

import importlib
import os
import re
import tomllib
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from packaging.version import Version

ROOT = Path(__file__).parent.parent
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
REQUIREMENTS = [
    Requirement(text)
    for text in [
        *PROJECT["dependencies"],
        *(text for extra in PROJECT["optional-dependencies"].values() for text in extra),
    ]
]


def constraints() -> dict[str, Version]:
    lines = (ROOT / "constraints.txt").read_text().splitlines()
    pins = [Requirement(line) for line in lines if line and not line.startswith("#")]
    return {canonicalize_name(pin.name): Version(re.sub("^==", "", str(pin.specifier))) for pin in pins}


@pytest.mark.parametrize("requirement", REQUIREMENTS, ids=lambda requirement: requirement.name)
def test_the_tested_version_of_every_dependency_lies_in_its_range(requirement: Requirement) -> None:
    assert constraints()[canonicalize_name(requirement.name)] in requirement.specifier


def test_the_console_script_is_the_command_line() -> None:
    module, _, name = PROJECT["scripts"]["speculative-runner"].partition(":")
    assert callable(getattr(importlib.import_module(module), name))


def test_top_level_packages_are_the_five_of_the_design() -> None:
    wheel = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["hatch"]["build"]["targets"]["wheel"]
    assert sorted(wheel["packages"]) == ["conf", "kernels", "proposers", "runner", "verifier"]
    assert all((ROOT / package / "__init__.py").is_file() for package in wheel["packages"])


def test_ci_script_can_be_executed() -> None:
    assert os.access(ROOT / ".ci" / "run", os.X_OK)
