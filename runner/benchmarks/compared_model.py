"""The model of a comparison with another engine: the tiny target, or one that a config.json describes."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import torch

from runner.benchmarks.demo_prompts import demo_prompts
from runner.engine.checkpoint import ModelSource, load_config
from runner.engine.errors import UserError
from runner.tiny import TARGET_DIR
from runner.tokenizer import Tokenizer


def add_model_options(parser: argparse.ArgumentParser, dtype: str) -> None:
    """--model and --dtype, of which `dtype` is the default."""
    parser.add_argument(
        "--model",
        type=Path,
        help="a directory with a config.json: plain decoding of that model, of random weights where it holds none",
    )
    parser.add_argument(
        "--dtype", choices=("float32", "bfloat16"), default=dtype, help="of both sides (default here: %(default)s)"
    )


def check_model(parser: argparse.ArgumentParser, options: argparse.Namespace) -> None:
    """Ends the program with the remedy where --model has no config that can be read, or a context that is too short."""
    if options.model is not None and not (options.model / "config.json").is_file():
        parser.error(f"--model must be a directory with a config.json, got {options.model}")
    try:
        longest = getattr(_language_model(options.model), "max_position_embeddings", None)
    except UserError as error:
        parser.error(str(error))
    if longest is not None and options.prompt_len + options.output_len > longest:
        parser.error(
            f"--prompt-len and --output-len must be {longest} tokens together at most, the target's context, got "
            f"{options.prompt_len} and {options.output_len}; lower one of them"
        )


def model_directory(model: Path | None) -> Path:
    return TARGET_DIR if model is None else model


def _language_model(model: Path | None) -> Any:
    return load_config(ModelSource(model=str(model_directory(model)), load_format="dummy", name="--model"))


def has_weights(directory: Path) -> bool:
    return any(directory.glob("*.safetensors"))


def compared_prompts(model: Path | None, count: int, prompt_len: int) -> list[list[int]]:
    """Demo prompts for the tiny target; another model has no tokenizer for certain, and gets random tokens."""
    if model is None:
        return demo_prompts(Tokenizer(TARGET_DIR), count, prompt_len)
    vocab_size, generator = int(_language_model(model).vocab_size), torch.Generator().manual_seed(0)
    prompts: list[list[int]] = torch.randint(vocab_size, (count, prompt_len), generator=generator).tolist()
    return prompts
