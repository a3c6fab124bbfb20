"""The text of `python -m runner --help`: examples, groups with their options, and every key with its meaning.

Read from conf/ and the schema, so it cannot drift from either.
"""

from __future__ import annotations

import shutil
import textwrap
from importlib import resources
from typing import Any

from omegaconf import OmegaConf
from pydantic import BaseModel

from runner.config.problem import ConfigError, Problem, node_classes, union_tag
from runner.config.root import SpeculativeConfig

EXAMPLES = """\
Runs a speculative decoding method on a model and measures it against plain decoding.

  python -m runner                                     the tiny trained model, CPU or GPU, no network
  python -m runner method=suffix sampler=sampled       another method, sampled
  python -m runner speculative_config=vllm.json        what you give to vllm serve --speculative-config
  python -m runner model=hf model.model=<directory or hub id> method=ngram
  python -m runner model=llama8b model.load_format=dummy workload=synthetic hardware=h200
  python -m runner workload=jsonl workload.path=prompts.jsonl sampler.max_tokens=256
  python -m runner method=eagle3 method.speculative_token_tree=dynamic method.num_speculative_tokens=16
  python -m runner model=llama8b method=eagle3 method.model=<directory or hub id of an EAGLE-3 head>
  python -m runner -m method=ngram,suffix,draft_model method.num_speculative_tokens=2,4
  python -m runner experiment=compare_methods          a prepared sweep
  python -m runner --cfg job                           print the composed configuration and stop
  python -m runner.tune --help                         the number of speculative tokens for every load
  python -m runner.train --help                        a draft head for a target of your own
  python -m runner --hydra-help                        Hydra's own flags"""

_GROUPS = ("model", "method", "sampler", "hardware", "workload", "experiment")
_TAGS = ("method", "name")  # the keys that tell the members of a union apart
_INDENT = 34


def options(group: str) -> list[str]:
    """The options of a configuration group: its YAML files."""
    files = resources.files("conf").joinpath(group).iterdir()
    return sorted(file.name.removesuffix(".yaml") for file in files if file.name.endswith(".yaml"))


def help_text() -> str:
    root = _yaml("config")
    defaults = {group: choice for entry in root["defaults"] if entry != "_self_" for group, choice in entry.items()}
    lines = [EXAMPLES, "", "Groups (group=option; * is the default)", ""]
    for group in _GROUPS:
        marked = [f"{option}*" if option == defaults[group] else option for option in options(group)]
        lines.append(_group_line(group, marked))
    lines += ["", "Methods (method=...)", ""]
    for node in node_classes(SpeculativeConfig.model_fields["method"].annotation):
        lines.append(f"  {union_tag(node):<17}{node.model_fields['method'].description}")
    lines += ["", "Keys (key=value) with their [default]; null leaves the choice to the runner", ""]
    nodes = {key: field for key, field in SpeculativeConfig.model_fields.items() if node_classes(field.annotation)}
    for key, field in SpeculativeConfig.model_fields.items():
        if key not in nodes:
            lines.append(_key_line(key, field.description, _shown(root[key])))
    for group in nodes:
        lines += ["", *_group_lines(group, str(defaults[group]))]
    return "\n".join(lines)


def _group_line(group: str, names: list[str]) -> str:
    return textwrap.fill("  ".join(names), _width(), initial_indent=f"  {group:<12}", subsequent_indent=" " * 14)


def _group_lines(group: str, default: str) -> list[str]:
    """Keys of a group in the order of its classes, each with its value in the YAML files that have it.

    Keys that only some members of a union have stand under the names of those.

    Raises:
        ConfigError: a key that no file has, as while a method is being written.
    """
    nodes = node_classes(SpeculativeConfig.model_fields[group].annotation)
    files = {option: _yaml(f"{group}/{option}") for option in [default, *options(group)]}
    sections: dict[str, dict[tuple[str, str | None], str]] = {"": {}}  # heading -> its keys; first those of all members
    for node in nodes:
        for key, field in node.model_fields.items():
            if key in _TAGS:
                continue  # a tag is chosen by the group's option
            sharing = [other for other in nodes if _has(other, key, field.description)]
            owners = [union_tag(other) for other in sharing] if nodes[1:] else [default]
            heading = "" if len(sharing) == len(nodes) else _wrapped(f"with {group}=", owners)
            having = [option for option in files if option in owners and key in files[option]]
            if not having:
                rule = f"must have {key}, with its default: Hydra overrides no other keys"
                raise ConfigError([Problem(name=f"conf/{group}/{owners[0]}.yaml", rule=rule)])
            section = sections.setdefault(heading, {})
            if (key, field.description) not in section:
                value = _values_of(key, having, files)
                section[key, field.description] = _key_line(f"{group}.{key}", field.description, value)
    lines = []
    for heading, keys in sections.items():
        lines += [*(("", heading) if heading else ()), *keys.values()]
    return lines


def _wrapped(title: str, names: list[str]) -> str:
    return textwrap.fill(f"  {title}{', '.join(names)}", _width(), subsequent_indent="    ", break_on_hyphens=False)


def _has(node: type[BaseModel], key: str, description: str | None) -> bool:
    return key in node.model_fields and node.model_fields[key].description == description


def _values_of(key: str, owners: list[str], files: dict[str, dict[str, Any]]) -> str:
    """The value of the first option, and of those that differ from it."""
    first = files[owners[0]][key]
    others = [f"{option}: {_shown(files[option][key])}" for option in owners[1:] if files[option][key] != first]
    return "; ".join([_shown(first), *others])


def _key_line(name: str, meaning: str | None, value: str) -> str:
    text = textwrap.fill(
        f"{meaning} [{value}]",
        _width(),
        break_on_hyphens=False,
        initial_indent=" " * _INDENT,
        subsequent_indent=" " * _INDENT,
    )
    name = f"  {name}"
    return f"{name:<{_INDENT - 1}} {text.lstrip()}" if len(name) < _INDENT else f"{name}\n{text}"


def _width() -> int:
    return max(80, min(shutil.get_terminal_size().columns, 140))


def _shown(value: Any) -> str:
    if value is None:
        return "null"
    if isinstance(value, bool):
        return str(value).lower()
    if value == "???":
        return "required"
    return "{...}" if isinstance(value, dict) and value else str(value)


def _yaml(name: str) -> dict[str, Any]:
    """The keys of a file, and those of the files that it starts from."""
    text = resources.files("conf").joinpath(f"{name}.yaml").read_text(encoding="utf-8")
    values = OmegaConf.to_container(OmegaConf.create(text))
    assert isinstance(values, dict)
    started_from = [entry for entry in values.get("defaults", ()) if str(entry).startswith("/")]
    shared = [_yaml(entry.removeprefix("/").removesuffix("@_here_")) for entry in started_from]
    return {str(key): value for part in (*shared, values) for key, value in part.items()}
