"""python -m runner.train: trains a draft head for a target of your own, on what the target itself says to your prompts.

Takes the groups and keys of `python -m runner` (model=, method=, workload=, sampler=, hardware=, seed=). The target
answers the prompts, all but every tenth, on this project's engine; the head learns from its states, frozen, and is
saved in the layout in which such heads are published. Then the method is run over the held-out prompts, beside plain
decoding, so that you know what the head is worth before you use it; tracking= records that, as of any run.
"""

from __future__ import annotations

import argparse
import math
import re
from collections.abc import Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any

from omegaconf import OmegaConf

from runner.cli.arguments import at_least, new_directory
from runner.cli.compose import Composer
from runner.cli.overrides import in_hydras_grammar
from runner.cli.program import exit_status, program_parser, use_it
from runner.config import DemoWorkload, JsonlWorkload, SpeculativeConfig, SyntheticWorkload
from runner.config.problem import ConfigError, Problem
from runner.engine.errors import UserError
from runner.train.options import TrainingOptions


def main(argv: Sequence[str] | None = None) -> int:
    options = _parse(argv)
    return exit_status(lambda: _run(options), kept=lambda: _kept(options.output))


def _kept(output: Path) -> str:
    is_saved = (output / "config.json").exists()
    return f"the head is in {output}, not yet measured" if is_saved else "nothing was saved"


def _run(options: argparse.Namespace) -> None:
    config = _read_config(options)
    from transformers.utils import logging as transformers_logging

    from runner.train.texts import split_prompts
    from runner.train.training import train
    from runner.workload import read_workload

    assert isinstance(config.workload, DemoWorkload | JsonlWorkload)
    items, held_out = split_prompts(read_workload(config.workload))  # what is wrong with it leaves no run behind
    transformers_logging.disable_progress_bar()  # type: ignore[no-untyped-call]  # one bar is enough
    chosen = TrainingOptions(**{field.name: getattr(options, field.name) for field in fields(TrainingOptions)})
    record, location = train(config, chosen, items, held_out)
    _print_result(options, record)
    if location is not None:
        print(f"tracked: {location}")


def _read_config(options: argparse.Namespace) -> SpeculativeConfig:
    """The run that the head is for: its method's model is the output.

    Raises:
        UserError: what cannot be trained, before anything is loaded.
    """
    from runner.train.heads.for_target import METHODS

    overrides = in_hydras_grammar(options.overrides)
    with Composer() as composer:
        composed = composer.compose_by_group(overrides, "to train a head")
        chosen = OmegaConf.select(composed, "method.method", default="none")  # ~method leaves none
        if chosen not in METHODS:
            rule, remedy = f"must be one of {', '.join(METHODS)}", f"add method={METHODS[1]}, say"
            raise ConfigError([Problem(name="method", rule=rule, value=chosen, remedy=remedy)])
        config = composer.config([*overrides, _model_override(options.output.resolve())])
    if config.method.num_speculative_tokens < 1:
        raise UserError("method.num_speculative_tokens must be >= 1, got 0; a head learns that many guesses")
    if config.model.load_format == "dummy":
        raise UserError("model.load_format must not be dummy: random weights say nothing that could be learnt")
    if config.model.hf_overrides:
        raise UserError(
            "model.hf_overrides must be null to train a head: the target is read as it is; write the values into its "
            "config.json"
        )
    if isinstance(config.workload, SyntheticWorkload):
        raise UserError("workload must have prompts, got synthetic; use workload=jsonl workload.path=<file>")
    return config


def _model_override(directory: Path) -> str:
    """As Hydra's grammar has it: quoted where the path is more than a word."""
    text = str(directory)
    if not re.fullmatch(r"[\w./-]+", text, re.ASCII):
        text = "'" + text.replace("\\", "\\\\").replace("'", "\\'") + "'"
    return f"method.model={text}"


def _print_result(options: argparse.Namespace, record: dict[str, Any]) -> None:
    print(
        f"{options.output}: {record['parameters'] / 1e6:.2f} M parameters, {record['steps']} steps over "
        f"{record['tokens']:,} tokens in {record['seconds']:.0f} s, loss {record['final_training_loss']:.3f}"
    )
    found = record["held_out"]
    text = f"held-out prompts: {found['num_requests']}; mean acceptance length "
    if (length := found["mean_acceptance_length"]) is None:
        text += "unknown, their answers are too short for a draft"
    else:
        by_position = ", ".join(f"{100 * rate:.0f}" for rate in found["acceptance_per_position"])
        text += f"{length:.2f} ({by_position} % by position)"
    if (speedup := found["speedup"]) is not None:
        text += f", {speedup:.2f}x plain decoding's speed"
    print("\n".join([text, *(f"note: {note}" for note in found["notes"])]))
    print(use_it([*options.overrides, _model_override(options.output)]))


def _parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = program_parser(
        "python -m runner.train",
        __doc__,
        epilog="example:\n  python -m runner.train --output heads/eagle3 model=hf model.model=<directory or hub id> "
        "method=eagle3 \\\n      workload=jsonl workload.path=prompts.jsonl sampler.max_tokens=256\n\n"
        "The target must fit the device beside the head. Methods: eagle, eagle3, mtp, medusa, mlp_speculator, dflash,\n"
        "dspark.\n"
        "Numbers were found on the tiny family; what they are worth on a large target is not known yet.",
    )
    parser.add_argument("--output", type=new_directory, required=True, metavar="DIR", help="a new one, for the head")
    for field in fields(TrainingOptions):
        flag, kind = f"--{field.name.replace('_', '-')}", at_least(1) if isinstance(field.default, int) else _positive
        text = f"{field.metadata['help']} (default: %(default)s)"
        parser.add_argument(flag, type=kind, default=field.default, metavar="N", help=text)
    return parser.parse_intermixed_args(argv)


def _positive(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not 0 < value < math.inf:
        raise argparse.ArgumentTypeError(f"must be a positive number, got {text!r}")
    return value
