"""What happens between the command line and Hydra: help, and every check that needs no model.

`checked(args)` returns only for a command line whose every point is valid; Hydra runs inside it.
"""

from __future__ import annotations

import argparse
import os
import re
import sys
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from importlib import metadata

from hydra import __version__ as hydra_version
from hydra._internal.utils import get_args_parser
from hydra.core.global_hydra import GlobalHydra
from hydra.types import RunMode
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from runner.cli.arguments import obstacle
from runner.cli.compose import Composer
from runner.cli.speculative_config import KEY
from runner.cli.sweep import Sweep, hydra_node, launching, read_sweep, require_files
from runner.cli.termination import interrupt_on_termination
from runner.cli.usage import help_text
from runner.config.problem import ConfigError, Problem


def parse_args(argv: list[str]) -> argparse.Namespace:
    """Hydra's own flags and overrides, in any order; an unknown flag exits with status 2."""
    parser = argparse.ArgumentParser(
        "python -m runner", parents=[get_args_parser()], add_help=False, conflict_handler="resolve"
    )
    parser.add_argument("--version", action="version", version=_versions())  # Hydra's shows its own alone
    return parser.parse_intermixed_args(argv)


def _overrides_first(argv: list[str], overrides: list[str]) -> list[str]:
    """The arguments as Hydra's parser takes them: overrides on both sides of a flag are too much for it."""
    flags = list(argv)
    for text in overrides:
        flags.remove(text)
    return [*overrides, *flags]


def _versions() -> str:
    try:
        own = metadata.version("speculative-runner")
    except metadata.PackageNotFoundError:  # run from its directory
        own = "(not installed)"
    return f"speculative-runner {own}, Hydra {hydra_version}"


@contextmanager
def checked(args: argparse.Namespace, argv: list[str]) -> Iterator[list[str]]:
    """The context that Hydra runs in; entering it prints the help, or checks everything that will run.

    Yields the arguments for Hydra: those given, overrides first, but of a sweep without the keys below swept groups.
    They are in every point, and Hydra would look for them in the group's default option too, which need not have them.

    Raises:
        ConfigError, SweepError: what is wrong, before anything ran.
    """
    interrupt_on_termination()
    os.environ.setdefault("HYDRA_FULL_ERROR", "1")  # Hydra then raises what went wrong instead of printing it
    if args.help:
        print(help_text())
        sys.exit(0)
    if args.cfg is not None and args.multirun:
        raise ConfigError([Problem(name="--cfg", rule="shows one configuration", remedy="leave out -m")])
    argv = _overrides_first(argv, args.overrides)
    if args.hydra_help or args.shell_completion or args.info is not None or args.config_path is not None:
        yield argv
        return
    sweep = None
    remedy = "add -m to run every one of them"
    with Composer(args.config_name, args.config_dir, sweep_remedy=remedy) as composer:
        hydra = hydra_node(composer, args.overrides)
        if args.cfg is not None:
            if composer.compose(args.overrides).get(KEY) is not None:
                print(f"{KEY} stands in place of the method group shown here", file=sys.stderr)
        elif args.multirun or hydra.mode == RunMode.MULTIRUN:
            sweep = read_sweep(composer, args.overrides, hydra)
            _check_directory("hydra.sweep.dir", hydra.sweep)
            if sweep is not None:
                _check_apart(hydra, sweep)
                require_files(sweep)
        else:
            composer.config(args.overrides)
            _check_directory("hydra.run.dir", hydra.run)
    if sweep is None:
        yield argv
        return
    _report_duplicates(sweep)
    with launching(sweep):
        yield [text for text in argv if text not in sweep.below_swept]


def _check_directory(name: str, node: DictConfig) -> None:
    """Hydra makes the directory of the files, the current one's runs/ by default; where it cannot, it only crashes."""
    try:
        path = str(node.dir)
    except OmegaConfBaseException:
        return  # it follows what only the job knows
    if (reason := obstacle(path)) is not None:
        remedy = f"{reason}; set {name}=<another directory>"
        value = os.path.abspath(path) if path else path
        raise ConfigError([Problem(name=name, rule="must be a directory that can be made", value=value, remedy=remedy)])


def _check_apart(hydra: DictConfig, sweep: Sweep) -> None:
    """Every job writes files of the same names, and Hydra lets a later one write over an earlier one's."""
    written = OmegaConf.to_container(hydra.sweep)
    assert isinstance(written, dict)
    if re.search(r"\$\{hydra[.:]job\.(num|id)\}", str(written["subdir"])):
        return  # by itself another one each time
    root = hydra._get_root()
    assert isinstance(root, DictConfig)
    directories = []
    for point in sweep.points:
        node = GlobalHydra.instance().config_loader().load_sweep_config(root, list(point)).hydra.sweep
        try:
            directories.append(os.path.normpath(os.path.join(str(node.dir), str(node.subdir))))
        except OmegaConfBaseException:
            return  # it follows what only the job knows
    directory, count = Counter(directories).most_common(1)[0]
    if count > 1:
        rule = "must give every point of a sweep a directory of its own"
        remedy = f"{directory} is that of {count} points; leave it out, or name the job in it: ${{hydra.job.num}}"
        raise ConfigError([Problem(name="hydra.sweep.subdir", rule=rule, value=written["subdir"], remedy=remedy)])


def _report_duplicates(sweep: Sweep) -> None:
    if sweep.duplicates:
        count = len(sweep.duplicates)
        subject = "1 point is the same run as an earlier one and is" if count == 1 else f"{count} points are the same"
        runs = "" if count == 1 else " runs as earlier ones and are"
        print(f"{subject}{runs} left out: {'; '.join(' '.join(point) for point in sweep.duplicates)}")
