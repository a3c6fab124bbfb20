"""Random weights on disk, for two engines that are to read the same ones."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from runner.engine.checkpoint import ModelSource, load_config
from runner.engine.errors import UserError


def draw_weights(model: Path, dtype: torch.dtype, directory: Path) -> None:
    """Write what transformers draws for a config, dense even where the config tells of quantized weights.

    Args:
        model: a directory with a config.json; of one that takes more than text its language model is drawn.
        directory: gets a checkpoint without a tokenizer.

    Raises:
        UserError: transformers has no such language model by itself, or the disk has no room.
    """
    from transformers import AutoModelForCausalLM

    config = load_config(ModelSource(model=str(model), load_format="dummy", name="--model"))
    if hasattr(config, "quantization_config"):
        del config.quantization_config
    try:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            drawn: Any = AutoModelForCausalLM.from_config(config, dtype=dtype)  # type: ignore[no-untyped-call]
    except (ValueError, ZeroDivisionError, TypeError, RuntimeError) as error:
        raise UserError(
            f"--model must have the config of a language model that transformers can draw by itself, got model_type "
            f"{config.model_type} in {model} ({str(error).splitlines()[0][:200]}); mend the config, or name a "
            "directory that has weights"
        ) from error
    try:
        drawn.save_pretrained(directory)
    except (OSError, RuntimeError) as error:  # of a full disk safetensors' is a RuntimeError
        raise UserError(
            f"the weights of {model} must find room in {directory.parent}, and could not be written ({error}); set "
            "TMPDIR to a directory with more of it"
        ) from error
