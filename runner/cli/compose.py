"""Hydra's composition of conf/, checked: command-line overrides in, one SpeculativeConfig or one ConfigError out.

Hydra reports one mistake at a time, in its own words; here all of them come out as name, rule, value, remedy.
"""

from __future__ import annotations

import os
import re
import shlex
from collections.abc import Iterator
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from hydra import compose, initialize_config_module
from hydra.conf import HydraConf
from hydra.core.global_hydra import GlobalHydra
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override
from hydra.errors import ConfigCompositionException, HydraException, MissingConfigException, OverrideParseException
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import ConfigAttributeError, ConfigKeyError, OmegaConfBaseException

from proposers import available_methods
from runner.cli.speculative_config import EXAMPLE, KEY, read_speculative_config
from runner.config.problem import UNKNOWN_KEY, ConfigError, Problem
from runner.config.root import SpeculativeConfig
from runner.config.vllm_keys import UNAVAILABLE_METHODS
from runner.engine.nearest_names import did_you_mean

CONFIG_MODULE = "conf"
HYDRA_VERSION_BASE = "1.3"
_TAGS = {"method": "method", "workload": "name"}  # of groups whose keys depend on the option: the key that names it


class Composer:
    """Composes points the way Hydra will compose them for the jobs. A context manager: Hydra's state is global."""

    def __init__(
        self, config_name: str | None = None, config_dir: str | None = None, sweep_remedy: str = "give one of them"
    ) -> None:
        self._config_name, self._sweep_remedy = config_name or "config", sweep_remedy
        if config_dir is not None and not os.path.isdir(config_dir):
            raise ConfigError([Problem(name="--config-dir", rule="must be a directory", value=config_dir)])
        self._search_path = [f"hydra.searchpath=[file://{os.path.abspath(config_dir)}]"] if config_dir else []

    def __enter__(self) -> Self:
        self._hydra = initialize_config_module(CONFIG_MODULE, version_base=HYDRA_VERSION_BASE)
        self._hydra.__enter__()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._hydra.__exit__(kind, error, traceback)

    def parse(self, overrides: list[str]) -> list[Override]:
        """Overrides by Hydra's grammar.

        Raises:
            ConfigError: one is no override.
        """
        try:
            parser = OverridesParser.create(config_loader=GlobalHydra.instance().config_loader())
            return parser.parse_overrides(overrides)
        except HydraException as error:
            raise ConfigError([_problem_of(error, overrides)]) from error

    def compose(self, overrides: list[str]) -> DictConfig:
        """The composed configuration with Hydra's own node, not yet validated.

        Raises:
            ConfigError: what Hydra refuses; its cause is Hydra's own error.
        """
        if problems := [problem for override in self.parse(overrides) for problem in self._not_one_choice(override)]:
            raise ConfigError(problems)
        try:
            cfg = self._compose(overrides)
            is_given = OmegaConf.select(cfg, KEY) is not None  # it may be ${...}, and that of nothing
        except (HydraException, OmegaConfBaseException, ValueError) as error:
            problems = self._unknown_keys(overrides) if _is_unknown_key(error) else []
            raise ConfigError(problems or [_problem_of(error, overrides)]) from error
        if is_given and (named := self._named_methods(cfg, overrides)):
            rule = f"excludes {' and '.join(named)}: each says which method to run"
            raise ConfigError([Problem(name=KEY, rule=rule, remedy=f"leave out one of them, or set {KEY}=null")])
        return cfg

    def compose_by_group(self, overrides: list[str], purpose: str) -> DictConfig:
        """The same for programs that set keys of the method group themselves.

        Raises:
            ConfigError: a speculative_config stands in the group's place, or what Hydra refuses.
        """
        cfg = self.compose(overrides)
        if cfg.get(KEY) is not None:
            remedy = "write its keys as method=<method> method.<key>=<value>"
            raise ConfigError([Problem(name=KEY, rule=f"must be null {purpose}", remedy=remedy)])
        return cfg

    def config(self, overrides: list[str]) -> SpeculativeConfig:
        """The validated configuration of one point.

        Raises:
            ConfigError: everything that is wrong with it.
        """
        problems: list[Problem] = []
        while True:
            try:
                config = read_config(self.compose(overrides))
                break
            except ConfigError as error:
                misplaced = self._option_within(overrides)
                problems.extend(error.problems if misplaced is None else [misplaced])
                group = _group_of_missing_option(error.__cause__)
                group = group if misplaced is None else misplaced.name.partition(".")[0]
                kept = [text for text in overrides if not (group and re.match(rf"{re.escape(group)}[.=]", text))]
                if len(kept) == len(overrides):
                    raise ConfigError(problems) from error
                overrides = kept  # go on without the group that nothing is known of, to see what else is wrong
        if problems:
            raise ConfigError(problems)
        return config

    def _not_one_choice(self, override: Override) -> Iterator[Problem]:
        """What Hydra says unclearly: no key, values of a sweep without -m, and null or a number for a group."""
        key, value = override.key_or_group, written_value(override)
        if not key:
            remedy = "a key is missing before the =; --help shows every group and key"
            yield Problem(name=str(override.input_line), rule="is not of the form key=value", remedy=remedy)
        elif override.is_sweep_override():
            remedy = self._sweep_remedy
            if not GlobalHydra.instance().config_loader().get_group_options(key):
                remedy += f", write {key}=[{value}] for a list, or {_quoted(key, value)} for one text"
            yield Problem(name=key, rule="must be one value", value=value, remedy=remedy)
        elif not override.is_delete() and not isinstance(override.value(), str | list | dict):
            options = GlobalHydra.instance().config_loader().get_group_options(key)
            if options:
                yield Problem(name=key, rule=f"must be one of {', '.join(options)}", value=value)

    def _option_within(self, overrides: list[str]) -> Problem | None:
        """An option that is written as a key of its group (`method={method: x}`): the keys stay the chosen option's."""
        parsed = self.parse(overrides)
        for override in parsed:
            group, _, key = override.key_or_group.partition(".")
            values = {key: override.value()} if key else override.value()
            option = values.get(_TAGS.get(group, "")) if isinstance(values, dict) else None
            if option not in GlobalHydra.instance().config_loader().get_group_options(group):
                continue
            chosen = [other.value() for other in parsed if other.key_or_group == group and other is not override]
            if option != (chosen or [self.compose([]).hydra.runtime.choices.get(group)])[-1]:
                remedy = f"write {group}={option}, and keys of it as {group}.<key>=<value>"
                name = f"{group}.{_TAGS[group]}"
                return Problem(name=name, rule=f"does not choose the {group}", value=option, remedy=remedy)
        return None

    def _named_methods(self, cfg: DictConfig, overrides: list[str]) -> list[str]:
        """What says which method to run: overrides, or an experiment whose file sets another than the default."""
        parsed = self.parse(overrides)
        named = [str(item.input_line) for item in parsed if re.match(r"method\b", item.key_or_group)]
        experiments = [str(item.input_line) for item in parsed if item.key_or_group == "experiment"]
        if not named and experiments and cfg.get("method") != self._compose([]).get("method"):
            return experiments
        return named

    def _compose(self, overrides: list[str]) -> DictConfig:
        return compose(self._config_name, overrides=[*self._search_path, *overrides], return_hydra_config=True)

    def _unknown_keys(self, overrides: list[str]) -> list[Problem]:
        """All problems of overrides with unknown keys: the schema, unlike Hydra, names every one and suggests."""
        groups = GlobalHydra.instance().config_loader().list_groups("")
        forced: list[str] = []
        of_nulls: list[str] = []  # the schema takes null for some keys of vLLM's that a method lacks
        for override in self.parse(overrides):
            key = override.key_or_group
            is_plain = not (override.is_add() or override.is_force_add() or override.is_delete())
            is_value = is_plain and key not in groups and "/" not in key and override.package is None
            forced.append(f"{'++' if is_value else ''}{override.input_line}")
            of_nulls.append(f"++{key}='null'" if is_value and override.value() is None else forced[-1])
        unknown = (problem for problem in self._problems(of_nulls) if problem.rule == UNKNOWN_KEY)
        return self._problems(forced) or list(unknown)

    def _problems(self, overrides: list[str]) -> list[Problem]:
        try:
            read_config(self._compose(overrides))
        except ConfigError as error:
            return list(error.problems)
        except (HydraException, OmegaConfBaseException, ValueError):
            pass  # the caller reports what Hydra said first
        return []


def written_value(override: Override) -> str:
    """The value of an override as it was typed, sweeps included."""
    return (override.input_line or "").partition("=")[2]


def written_choices(job: HydraConf) -> dict[str, str]:
    """The option of every group, and what the command line set: how the points of a sweep are told apart.

    The resolved configuration has no name for sampler=sampled, and a mapping falls apart in it. The method is in it.
    """
    choices = {group: option for group, option in job.runtime.choices.items() if option is not None}
    for text in job.overrides.task:
        key, _, value = text.partition("=")
        choices[key.lstrip("+~")] = value
    return {key: value for key, value in choices.items() if key != "method" and re.fullmatch(r"[\w.]+", key)}


def read_config(cfg: DictConfig) -> SpeculativeConfig:
    """The validated configuration of what Hydra composed; its own node is left out.

    Raises:
        ConfigError: everything that is wrong with it.
    """
    try:
        values = OmegaConf.to_container(
            OmegaConf.masked_copy(cfg, [str(key) for key in cfg if key != "hydra"]), resolve=True
        )
    except OmegaConfBaseException as error:
        raise ConfigError([_problem_of(error, [])]) from error
    assert isinstance(values, dict)
    problems: list[Problem] = []
    if values.get(KEY) is not None:
        values.pop("method", None)  # the group's default: the command line names none beside a speculative_config
        try:
            values[KEY] = read_speculative_config(values[KEY], Path.cwd())
        except ConfigError as error:
            problems.extend(error.problems)
            del values[KEY]
    missing = list(_drop_missing(values))
    try:
        config = SpeculativeConfig.parse({str(key): value for key, value in values.items()})
    except ConfigError as error:
        problems.extend(error.problems)
    reported = {problem.name for problem in problems}
    problems.extend(
        Problem(name=name, rule="is required", remedy=f"add {name}=<value>") for name in missing if name not in reported
    )
    if problems:
        raise ConfigError(problems)
    return config


def _drop_missing(values: dict[Any, Any], prefix: str = "") -> Iterator[str]:
    """Delete the entries that are still ??? and give their names."""
    for key, value in list(values.items()):
        if isinstance(value, dict):
            yield from _drop_missing(value, f"{prefix}{key}.")
        elif value == "???":
            del values[key]
            yield f"{prefix}{key}"


def _group_of_missing_option(error: BaseException | None) -> str | None:
    if isinstance(error, MissingConfigException) and error.options is not None and error.missing_cfg_file:
        return _group_and_option(error.missing_cfg_file)[0]
    return None


def _group_and_option(file: str) -> tuple[str, str]:
    """Of an option's file; what somebody wrote for a model may be an id or a path, with slashes of its own."""
    group, _, option = file.partition("/") if file.startswith("model/") else file.rpartition("/")
    return group, option


def _is_unknown_key(error: BaseException) -> bool:
    return isinstance(error, ConfigCompositionException) and isinstance(
        error.__cause__, ConfigAttributeError | ConfigKeyError
    )


def _problem_of(error: Exception, overrides: list[str]) -> Problem:
    message = str(error).strip()
    if isinstance(error, MissingConfigException) and error.options is not None and error.missing_cfg_file:
        group, option = _group_and_option(error.missing_cfg_file)
        rule = f"must be one of {', '.join(error.options)}"
        remedy = did_you_mean(option, error.options)
        if group == "method" and option in UNAVAILABLE_METHODS:
            remedy = f"{option} is not available yet"
        elif group == "method" and option in available_methods():
            wanted = f"conf/method/{option}.yaml beside the others; proposers/methods.md has one"
            remedy = f"proposers/{option}.py wants a {wanted}"
        elif group == "model" and ("/" in option or not remedy.startswith("did")):
            remedy = f"a directory or hub id of your own is model=hf model.model={option}"
        elif not remedy.startswith("did"):
            remedy = ""
        return Problem(name=group, rule=rule, value=option, remedy=remedy)
    if isinstance(error, OverrideParseException):
        return _unreadable(str(error.override), message.splitlines()[0])
    if isinstance(error, OmegaConfBaseException) and error.full_key:
        return Problem(name=str(error.full_key), rule=f"cannot be resolved: {message.splitlines()[0]}")
    twice = re.match(r"Multiple values for (\S+)\.|Could not append to config\. An item is already at '(\S+)'", message)
    appended = [text for text in overrides if twice and text.startswith(f"+{twice[1] or twice[2]}=")]
    if appended:
        return Problem(name=appended[0], rule="adds what is there already", remedy=f"write {appended[0][1:]}")
    if error.__cause__ is not None:
        message += "\n" + str(error.__cause__).splitlines()[0]
    return Problem(name="configuration:", rule=" ".join(line.strip() for line in message.splitlines() if line.strip()))


def _unreadable(override: str, message: str) -> Problem:
    """An override that Hydra's grammar does not take: no override at all, or a value with characters of its own."""
    key, is_assignment, value = override.partition("=")
    if re.match(rf"\+*{KEY}=", override):
        return Problem(name=override, rule="is not of the form key=value", remedy=EXAMPLE)
    if is_assignment:
        remedy = f"if it is text, quote it twice: {_quoted(key, value)} (Hydra: {message})"
        return Problem(name=key, rule="must be a value that Hydra can read", value=value, remedy=remedy)
    remedy = "--help shows every group and key"
    if override in available_methods():
        remedy = f"write method={override}"
    return Problem(name=override, rule="is not of the form key=value", remedy=remedy)


def _quoted(key: str, value: str) -> str:
    """The override as a shell hands it on, of a value that Hydra shall take as it is."""
    return shlex.quote(f'{key}="{value}"')
