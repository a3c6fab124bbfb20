"""python -m runner.train: trains a draft head for a target of your own, on what the target itself says to your prompts.

Takes the groups and keys of `python -m runner` (model=, method=, workload=, sampler=, hardware=, seed=). The target
answers the prompts, all but every tenth, on this project's engine; the head learns from its states, frozen, and is
saved in the layout in which such heads are published. Then the method is run over the held-out prompts, beside plain
decoding, so that you know what the head is worth before you use it.
"""

from __future__ import annotations

import argparse
import gc
import math
import os
import re
import shlex
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from runner.cli.arguments import at_least
from runner.cli.compose import Composer
from runner.cli.screen import INTERRUPT_STATUS, show_error
from runner.config import DemoWorkload, JsonlWorkload, SpeculativeConfig, SyntheticWorkload
from runner.config.problem import ConfigError, Problem
from runner.engine.errors import UserError

RECORD_FILE = "training.json"
LEARNING_RATE = 0.012  # at a hidden size of WIDTH; wider matrices take steps smaller by the root
WIDTH = 256


def main(argv: Sequence[str] | None = None) -> int:
    options = _parse(argv)
    # Threads that spin while they wait for each other crawl once another program wants a core; asleep, they share.
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    try:
        config = _read_config(options)
        _train(config, options)
    except UserError as error:
        return show_error(error)
    except KeyboardInterrupt:
        is_saved = (options.output / "config.json").exists()
        kept = f"the head is in {options.output}, not yet measured" if is_saved else "nothing was saved"
        print(f"interrupted; {kept}", file=sys.stderr)
        return INTERRUPT_STATUS
    return 0


def _read_config(options: argparse.Namespace) -> SpeculativeConfig:
    """The run that the head is for: its method's model is the output.

    Raises:
        UserError: what cannot be trained, or has no room, before anything is loaded.
    """
    from runner.train.heads.for_target import METHODS

    output = options.output
    if output.exists() and (not output.is_dir() or any(output.iterdir())):
        raise UserError(f"--output must be a new or empty directory, got {str(output)!r}; choose another, or remove it")
    with Composer() as composer:
        chosen = composer.compose(options.overrides).method.method
        if chosen not in METHODS:
            rule, remedy = f"must be one of {', '.join(METHODS)}", f"add method={METHODS[1]}, say"
            raise ConfigError([Problem(name="method", rule=rule, value=chosen, remedy=remedy)])
        config = composer.config([*options.overrides, _model_override(output.resolve())])
    if config.model.load_format == "dummy":
        raise UserError("model.load_format must not be dummy: random weights say nothing that could be learnt")
    if isinstance(config.workload, SyntheticWorkload):
        raise UserError("workload must have prompts, got synthetic; use workload=jsonl workload.path=<file>")
    return config


def _model_override(directory: Path) -> str:
    """As Hydra's grammar has it: quoted where the path is more than a word."""
    text = str(directory)
    if not re.fullmatch(r"[\w./-]+", text, re.ASCII):
        text = "'" + text.replace("\\", "\\\\").replace("'", "\\'") + "'"
    return f"method.model={text}"


def _train(config: SpeculativeConfig, options: argparse.Namespace) -> None:
    import torch
    from transformers.utils import logging as transformers_logging

    from runner.engine.checkpoint import resolve_directory
    from runner.llm import LLM
    from runner.model_files import model_source
    from runner.results import write_metrics
    from runner.run import measure
    from runner.train.directory import replaced_directory
    from runner.train.fit import fit_head, load_frozen, read_states
    from runner.train.heads.for_target import head_for
    from runner.train.optimizer import OptimizerSettings
    from runner.train.progress import stage_bars
    from runner.train.texts import split_prompts, write_texts
    from runner.workload import read_workload

    assert isinstance(config.workload, DemoWorkload | JsonlWorkload)
    items, held_out = split_prompts(read_workload(config.workload))
    transformers_logging.disable_progress_bar()  # type: ignore[no-untyped-call]  # one bar is enough
    method, started = config.method, time.perf_counter()
    with stage_bars() as report_of:
        writer = LLM.from_config(SpeculativeConfig.parse({**config.model_dump(), "method": {"method": "none"}}))
        if options.length > (longest := writer.engine.target_info.max_model_len):
            raise UserError(
                f"--length must be <= {longest}, the target's max_model_len, got {options.length}; lower it"
            )
        texts = write_texts(
            writer,
            items,
            config.sampler.to_sampling_params(),
            num_texts=options.texts,
            length=options.length,
            report=report_of("target writes"),
        )
        device, dtype = writer.engine.device, writer.engine.dtype
        del writer
        gc.collect()  # its cache makes room
        if device.type == "cuda":
            torch.cuda.empty_cache()
        directory = resolve_directory(model_source(config.model, "model.model"))
        remote = config.model.trust_remote_code
        target = load_frozen(directory, device=device, dtype=dtype, trust_remote_code=remote)
        head = head_for(
            method.method,
            target,
            num_speculative_tokens=method.num_speculative_tokens,
            token_counts=texts.token_counts,
            states=read_states(target, texts.windows[:1]),
            seed=config.seed,
        )
        rate = options.learning_rate or LEARNING_RATE * math.sqrt(WIDTH / target.config.hidden_size)
        record: dict[str, Any] = fit_head(
            head,
            texts.windows,
            num_steps=options.steps,
            num_rows=options.rows,
            optimizer=OptimizerSettings(
                matrix_lr=rate,
                embedding_lr=0.4 * rate,
                warmup_steps=min(10, options.steps),
                decay_share=0.7,
                float32_muon=device.type == "cpu",
            ),
            seed=config.seed,
            report=report_of(method.method),
        )
    record |= {
        "parameters": sum(parameter.numel() for parameter in head.parameters()),
        "seconds": round(time.perf_counter() - started, 1),
        "learning_rate": rate,
        **{key: getattr(options, key) for key in ("steps", "rows", "length", "texts")},
        "config": config.model_dump(mode="json"),
    }
    with replaced_directory(options.output) as new:
        head.save(new)
        write_metrics(new / RECORD_FILE, record)
    del head, target
    gc.collect()
    summary = measure(LLM.from_config(config), held_out).summary
    write_metrics(options.output / RECORD_FILE, {**record, "held_out": summary})
    _print_result(options, record, summary)


def _print_result(options: argparse.Namespace, record: dict[str, Any], summary: dict[str, Any]) -> None:
    length, speedup, rates = (summary[key] for key in ("mean_acceptance_length", "speedup", "acceptance_per_position"))
    print(
        f"{options.output}: {record['parameters'] / 1e6:.2f} M parameters, {record['steps']} steps over "
        f"{record['tokens']:,} tokens in {record['seconds']:.0f} s, loss {record['final_training_loss']:.3f}"
    )
    by_position = ", ".join(f"{100 * rate:.0f}" for rate in rates)
    worth = "" if speedup is None else f", {speedup:.2f}x plain decoding's speed"
    print(
        f"held-out prompts: {summary['num_requests']}; mean acceptance length "
        f"{'none' if length is None else f'{length:.2f}'} ({by_position} % by position){worth}"
    )
    print(f"use it: python -m runner {shlex.join([*options.overrides, _model_override(options.output)])}")


def _parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m runner.train",
        formatter_class=argparse.RawDescriptionHelpFormatter,
        description=__doc__,
        epilog="example:\n  python -m runner.train --output heads/eagle3 model=hf model.model=<directory or hub id> "
        "method=eagle3 \\\n      workload=jsonl workload.path=prompts.jsonl sampler.max_tokens=256\n\n"
        "The target must fit the device beside the head. Methods: eagle, eagle3, mtp, medusa, mlp_speculator, dflash.\n"
        "Numbers were found on the tiny family; what they are worth on a large target is not known yet.",
    )
    parser.add_argument("overrides", nargs="*", metavar="group=option|key=value", help="as for python -m runner")
    parser.add_argument("--output", type=Path, required=True, metavar="DIR", help="a new directory for the head")
    for name, default, what in (
        ("steps", 400, "optimizer steps"),
        ("rows", 8, "windows of text a step"),
        ("length", 256, "tokens of a window"),
        ("texts", 4, "answers a prompt: one greedy, the others at temperature 1"),
    ):
        parser.add_argument(f"--{name}", type=at_least(1), default=default, help=f"{what} (default: %(default)s)")
    rate_help = f"of matrices, by Muon (default: {LEARNING_RATE} x sqrt({WIDTH} / hidden size)); 0.4 of it for AdamW"
    parser.add_argument("--learning-rate", type=_positive, default=None, metavar="RATE", help=rate_help)
    return parser.parse_intermixed_args(argv)  # an override may stand behind an option


def _positive(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not 0 < value < math.inf:
        raise argparse.ArgumentTypeError(f"must be a positive number, got {text!r}")
    return value
