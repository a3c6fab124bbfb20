"""The command line in this process: what it prints, how it ends, and which configurations it would have run."""

from __future__ import annotations

import copy
import logging
import sys
import types
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from hydra._internal.config_loader_impl import ConfigLoaderImpl
from hydra._internal.sources_registry import SourcesRegistry
from hydra.plugins.config_source import ConfigResult
from hydra.types import RunMode
from omegaconf import DictConfig

from runner.__main__ import main
from runner.cli.sweep import _basic_sweeper
from runner.config import SpeculativeConfig

Job = tuple[SpeculativeConfig, Path]


@dataclass(frozen=True, kw_only=True)
class Ending:
    status: int
    out: str
    err: str
    jobs: list[Job]  # configuration and output directory of every run that was started


LOADED: dict[tuple[str, str], ConfigResult] = {}  # the files of conf/ and of Hydra's own, read once
COMPOSED: dict[tuple[Any, ...], DictConfig] = {}  # what they give under one set of overrides, composed once


class CommandLine:
    """Runs `main` in an empty directory with `runner.run.execute` replaced by one that only takes notes."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], directory: Path) -> None:
        self._capsys = capsys
        self.jobs: list[Job] = []
        self.written: list[dict[str, str]] = []
        self.on_job: Callable[[SpeculativeConfig], None] = lambda config: None
        monkeypatch.chdir(directory)
        monkeypatch.setattr(sys, "argv", ["runner"])
        monkeypatch.setenv("HYDRA_FULL_ERROR", "1")
        monkeypatch.setenv("MLFLOW_TRACKING_URI", "sqlite:///must-not-be-used.db")
        module = types.ModuleType("runner.run")
        module.execute = self._execute  # type: ignore[attr-defined]
        monkeypatch.setitem(sys.modules, "runner.run", module)
        # Hydra composes every point of a sweep to see that it can, behind `main`, which did so, and before the job,
        # for which it does so again: a third of the time of these tests.
        monkeypatch.setattr(_basic_sweeper(), "validate_batch_is_legal", lambda self, batch: None)
        of_packages: Any = SourcesRegistry.instance().resolve("pkg")
        load = of_packages.load_config

        def load_config(source: Any, config_path: str) -> ConfigResult:
            if (key := (source.path, config_path)) not in LOADED:
                LOADED[key] = load(source, config_path)
            return copy.deepcopy(LOADED[key])

        monkeypatch.setattr(of_packages, "load_config", load_config)
        compose = ConfigLoaderImpl._load_configuration_impl

        def compose_once(
            loader: ConfigLoaderImpl, config_name: str | None, overrides: list[str], run_mode: RunMode, **checks: bool
        ) -> DictConfig:
            sources = [source.path for source in loader.get_search_path().get_path()]
            are_ours = all(path.startswith(("pkg://", "structured://")) for path in sources)
            if not are_ours or any(text.startswith("hydra.searchpath") for text in overrides):
                return compose(loader, config_name, overrides, run_mode, **checks)  # a test may write them anew
            key = (config_name, *overrides, run_mode, checks["validate_sweep_overrides"], *sources)
            if key not in COMPOSED:
                COMPOSED[key] = compose(loader, config_name, overrides, run_mode, **checks)
            composed = copy.deepcopy(COMPOSED[key])
            composed.hydra.runtime.cwd = str(Path.cwd())  # all that depends on more than the key
            return composed

        monkeypatch.setattr(ConfigLoaderImpl, "_load_configuration_impl", compose_once)

    def __call__(self, *argv: str) -> Ending:
        with logging_as_it_was():
            try:
                status = main(list(argv))
            except SystemExit as exit_:
                status = int(exit_.code or 0)
        captured = self._capsys.readouterr()
        return Ending(status=status, out=captured.out, err=captured.err, jobs=self.jobs)

    def _execute(self, config: SpeculativeConfig, output_dir: Path, *, written: dict[str, str], **_: object) -> None:
        self.written.append(written)
        self.jobs.append((config, output_dir))
        self.on_job(config)


@contextmanager
def logging_as_it_was() -> Iterator[None]:
    """Every Hydra job points the root logger at its own streams and files."""
    root = logging.getLogger()
    handlers, level = root.handlers[:], root.level
    try:
        yield
    finally:
        for handler in root.handlers:
            if handler not in handlers:
                handler.close()
        root.handlers[:], root.level = handlers, level
