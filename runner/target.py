"""The target's weights on the run's device, in the run's dtype."""

from __future__ import annotations

from pathlib import Path

import torch

from kernels.cpu.panels import multiplies_and_adds, multiplies_pairs
from runner.config import SpeculativeConfig
from runner.engine.checkpoint import DTYPES, ModelSource, load_config
from runner.engine.errors import UserError
from runner.engine.loader import LoadedModel, load_model
from runner.engine.shard import Shard
from runner.model_files import model_source
from runner.tiny import BUILT_IN_MODELS


def load_target(config: SpeculativeConfig, shard: Shard | None = None) -> LoadedModel:
    """The target's weights on the run's device; shard: which of them, None: all.

    Raises:
        UserError: no such device or model, or one that does not fit.
    """
    hide_kernels_client()
    hardware = config.hardware
    device = resolve_device(hardware.device)
    if hardware.num_threads is not None:
        torch.set_num_threads(hardware.num_threads)
    source = model_source(config.model, "model.model")
    dtype = resolve_dtype(hardware.dtype, device, source)
    return load_model(
        source,
        device=device,
        dtype=dtype,
        max_model_len=config.model.max_model_len,
        shard=shard,
        reads_kv_scales=hardware.kv_cache_dtype == "fp8",
    )


def resolve_device(name: str) -> torch.device:
    """Raises UserError when the device is not there."""
    if name == "cuda" and not torch.cuda.is_available():
        raise UserError(
            "hardware.device=cuda needs a CUDA GPU that torch can use, and none was found; "
            "choose hardware.device=cpu, or install a CUDA build of torch"
        )
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    return torch.device(name)


def resolve_dtype(name: str, device: torch.device, source: ModelSource) -> torch.dtype:
    """auto: the checkpoint's own, but float32 where a CPU would have to widen it, and for the tiny family."""
    if name != "auto":
        return DTYPES[name]
    if Path(source.model) in BUILT_IN_MODELS.values():
        return torch.float32  # stored in bfloat16 for its size only
    stored = getattr(load_config(source), "dtype", None)
    if device.type == "cpu":
        is_fast = multiplies_and_adds() and multiplies_pairs()
        return torch.bfloat16 if stored == torch.bfloat16 and is_fast else torch.float32
    return next((dtype for dtype in DTYPES.values() if dtype == stored), torch.bfloat16)


def hide_kernels_client() -> None:
    """Keep transformers from taking our `kernels` package for an optional client of the same name.

    Its probe finds any package called `kernels`; with the real client installed beside us, model imports would break.
    """
    import kernels

    if not getattr(kernels, "IS_SPECULATIVE_RUNNER", False):
        raise UserError(
            f"the package `kernels` must be this project's, found {kernels.__file__}; "
            "uninstall the Hugging Face client of that name, or run from the project's directory"
        )
    import transformers.utils as utils
    import transformers.utils.import_utils as import_utils

    def is_kernels_available(*_: object, **__: object) -> bool:
        return False

    for module in (import_utils, utils):
        setattr(module, "is_kernels_available", is_kernels_available)  # noqa: B010 - mypy knows it as a function
