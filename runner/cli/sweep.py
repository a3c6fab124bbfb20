"""Every point of a multirun, composed and validated before Hydra gets the first.

Hydra would find a bad point only when it reaches it, after earlier jobs ran. Points that are the same run once
ignored keys are out (method=none at several draft lengths) are run once.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from traceback import format_exception_only
from typing import Any

from hydra.core.override_parser.types import Override
from hydra.core.plugins import Plugins
from hydra.core.utils import JobReturn, JobStatus
from hydra.errors import HydraException
from hydra.plugins.sweeper import Sweeper
from omegaconf import DictConfig

from runner.cli.compose import Composer, written_value
from runner.cli.screen import BUG_STATUS, USER_ERROR_STATUS, problem_lines
from runner.config.problem import ConfigError, Problem
from runner.config.root import SpeculativeConfig
from runner.config.suffix_method import SuffixKeys
from runner.config.workload import JsonlWorkload
from runner.engine.errors import UserError

BASIC_SWEEPER = "hydra._internal.core_plugins.basic_sweeper.BasicSweeper"
KEYS_OF_THE_RECORD = ("tracking", "tracking_uri", "experiment_name")  # where the points of a sweep are found together


@dataclass(frozen=True, kw_only=True)
class Sweep:
    """The distinct points of a multirun, in Hydra's order."""

    points: tuple[tuple[str, ...], ...]  # the overrides of each job
    configs: tuple[SpeculativeConfig, ...]  # of each point
    duplicates: tuple[tuple[str, ...], ...]  # points left out because an earlier one is the same run
    swept: dict[str, str]  # key -> its values as written
    below_swept: frozenset[str]  # overrides of keys below a swept group, which its default option may not have


class SweepError(UserError):
    """Some points of a sweep cannot run, so none was."""

    def __init__(self, num_points: int, failures: list[tuple[tuple[str, ...], ConfigError]]) -> None:
        self.num_points = num_points
        self.failures = failures
        super().__init__(num_points, failures)  # the arguments pickle

    def __str__(self) -> str:
        one = self.num_points == len(self.failures) == 1
        verb = "is" if len(self.failures) == 1 else "are"
        points = "the only point" if one else f"{len(self.failures)} of {self.num_points} points"
        lines = [f"{points} of this sweep {verb} invalid; nothing was run"]
        by_problems: dict[tuple[str, ...], list[tuple[str, ...]]] = {}
        for point, error in self.failures:
            by_problems.setdefault(tuple(problem_lines(error.problems)), []).append(point)
        for problems, points_with in by_problems.items():
            more = f"   (and {len(points_with) - 1} more)" if len(points_with) > 1 else ""
            lines += ["", f"  {' '.join(points_with[0]) or 'the defaults'}{more}", *(f"  {line}" for line in problems)]
        return "\n".join(lines)


class FailedPointsError(Exception):
    """Some points of a sweep failed when they ran; the others ran all the same."""

    def __init__(self, sweep: Sweep, failed: Sequence[JobReturn]) -> None:
        errors = [job._return_value for job in failed]  # the property raises it
        self.status = USER_ERROR_STATUS if all(isinstance(error, UserError) for error in errors) else BUG_STATUS
        lines = [f"{len(failed)} of {len(sweep.points)} points failed"]
        for job, error in zip(failed, errors, strict=True):
            overrides = list(job.overrides or ())
            swept = [text for text in overrides if _recorded_key(text.partition("=")[0]) in sweep.swept]
            reason = str(error) if isinstance(error, UserError) else "".join(format_exception_only(error)).strip()
            lines += ["", f"  {' '.join(swept or overrides) or 'the defaults'}"]
            lines += [f"      {line}" for line in reason.splitlines()]
        super().__init__("\n".join(lines))


def hydra_node(composer: Composer, overrides: list[str]) -> DictConfig:
    """Hydra's own settings under these overrides: the mode and the sweeper. Swept groups keep their defaults."""
    relevant = [override for override in composer.parse(overrides) if _concerns_hydra(override)]
    node = composer.compose([str(override.input_line) for override in relevant]).hydra
    assert isinstance(node, DictConfig)
    return node


def _concerns_hydra(override: Override) -> bool:
    return not override.is_sweep_override() and (override.is_hydra_override() or override.key_or_group == "experiment")


def read_sweep(composer: Composer, overrides: list[str], hydra: DictConfig) -> Sweep | None:
    """All points of a multirun, validated; None under a sweeper that chooses its points while it runs.

    Raises:
        ConfigError: an override is malformed, or the points would be recorded in different places.
        SweepError: at least one point is invalid.
    """
    if hydra.sweeper["_target_"] != BASIC_SWEEPER:
        return None
    params = [f"{key}={value}" for key, value in (hydra.sweeper.params or {}).items()]
    parsed = composer.parse(params + overrides)
    for_hydra = [str(override.input_line) for override in parsed if override.is_hydra_override()]
    of_points = [override for override in parsed if not override.is_hydra_override()]
    try:
        points = [tuple(point) for point in _basic_sweeper().split_arguments(of_points, None)[0]]
    except HydraException as error:
        raise ConfigError([Problem(name="sweep:", rule=str(error))]) from error
    configs, failures = [], []
    for point in points:
        try:
            configs.append(composer.config([*for_hydra, *point]))
        except ConfigError as error:
            failures.append((point, error))
    if failures:
        raise SweepError(len(points), failures)
    if problems := list(_different_records(configs)):
        raise ConfigError(problems)
    distinct: dict[str, tuple[tuple[str, ...], SpeculativeConfig]] = {}
    duplicates = []
    for point, config in zip(points, configs, strict=True):
        key = config.normalised().model_dump_json()
        if key in distinct:
            duplicates.append(point)
        else:
            distinct[key] = (point, config)
    swept = {_recorded_key(o.get_key_element()): written_value(o) for o in of_points if o.is_sweep_override()}
    plain = [o for o in of_points if not o.is_sweep_override()]
    return Sweep(
        points=tuple(point for point, _ in distinct.values()),
        configs=tuple(config for _, config in distinct.values()),
        duplicates=tuple(duplicates),
        swept=swept,
        below_swept=frozenset(str(o.input_line) for o in plain if o.key_or_group.partition(".")[0] in swept),
    )


def _recorded_key(key: str) -> str:
    """A key without the plus by which Hydra adds it: runs record it so."""
    return key.lstrip("+")


def _different_records(configs: Sequence[SpeculativeConfig]) -> Iterator[Problem]:
    for key in KEYS_OF_THE_RECORD:
        values = list(dict.fromkeys(getattr(config, key) for config in configs))
        if len(values) > 1:
            rule = "must be the same in every point of a sweep, which is one comparison"
            yield Problem(name=key, rule=rule, value=values, remedy="start a sweep for each")


def require_files(sweep: Sweep) -> None:
    """Of workloads and earlier responses: a point would otherwise miss its own behind those that ran.

    Raises:
        SweepError: at least one is missing.
    """
    failures = []
    for point, config in zip(sweep.points, sweep.configs, strict=True):
        problems: list[Problem] = []
        for require in _files(config):
            try:
                require()
            except ConfigError as error:
                problems.extend(error.problems)
        if problems:
            failures.append((point, ConfigError(problems)))
    if failures:
        raise SweepError(len(sweep.points), failures)


def _files(config: SpeculativeConfig) -> Iterator[Callable[[], object]]:
    if isinstance(config.workload, JsonlWorkload):
        yield config.workload.require_file
    if isinstance(config.method, SuffixKeys):
        yield config.method.require_corpus


@contextmanager
def launching(sweep: Sweep) -> Iterator[None]:
    """Inside, Hydra's sweeper launches exactly these points, as children of one parent run (tracking=mlflow).

    Hydra takes sweepers of one's own only from its plugin namespace, hence the replaced methods: the cross product it
    would make has the duplicates again, and of the points that failed it would name the first alone.

    Raises:
        FailedPointsError: at least one failed; all have run.
    """
    sweeper = _basic_sweeper()
    split, setup = sweeper.split_arguments, sweeper.setup
    failed: list[JobReturn] = []

    def split_arguments(overrides: list[Override], max_batch_size: int | None) -> list[list[list[str]]]:
        points = [list(point) for point in sweep.points]
        return list(sweeper.split_overrides_to_chunks(points, max_batch_size))

    def set_up(self: Any, **context: Any) -> None:
        setup(self, **context)
        launch = self.launcher.launch

        def launch_all(*batch: Any, **named: Any) -> list[JobReturn]:
            jobs = launch(*batch, **named)
            failed.extend(job for job in jobs if job.status is JobStatus.FAILED)
            return [job for job in jobs if job.status is not JobStatus.FAILED]  # one would end the sweep

        self.launcher.launch = launch_all

    sweeper.split_arguments, sweeper.setup = staticmethod(split_arguments), set_up
    try:
        with _parent_run(sweep):
            yield
            if failed:
                raise FailedPointsError(sweep, failed)
    finally:
        sweeper.split_arguments, sweeper.setup = staticmethod(split), setup


def _basic_sweeper() -> Any:
    """The class Hydra will use: its plugin scan imports the module anew, so an import of ours may be another one."""
    return next(sweeper for sweeper in Plugins.instance().discover(Sweeper) if sweeper.__name__ == "BasicSweeper")


@contextmanager
def _parent_run(sweep: Sweep) -> Iterator[None]:
    from runner.report import print_comparison
    from runner.tracking import RUNS_FILE, collecting_rows, start_sweep

    config, swept = sweep.configs[0], sweep.swept

    def show(rows: Sequence[Mapping[str, Any]]) -> None:
        print_comparison(rows, params=tuple(swept))
        if len(rows) < len(sweep.points):  # an interrupt, or points that could not start
            print(f" {len(rows)} of {len(sweep.points)} points are recorded")

    if config.tracking != "mlflow":  # which finds the runs of jobs on other machines too
        with collecting_rows() as rows_of:
            try:
                yield
            finally:
                if rows := rows_of(tuple(swept)):
                    show(rows)
                    if config.tracking == "jsonl":
                        print(f"sweep {Path.cwd() / RUNS_FILE}")
        return
    with start_sweep(
        params=swept,
        tracking_uri=config.tracking_uri,
        experiment_name=config.experiment_name,
        run_name=config.run_name or "sweep",
    ) as parent:
        try:
            yield
        finally:  # also what an interrupted or partly failed sweep has measured
            if rows := parent.children(tuple(swept)):
                show(rows)
                print(f"sweep {parent.location}")
                if parent.ui_command is not None:
                    print(f"show  {parent.ui_command}")
