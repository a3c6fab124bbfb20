"""Models of transformers from their checkpoints, or with random weights, every tensor checked."""

from __future__ import annotations

import copy
from typing import Any

import torch

from runner.engine.checkpoint import ModelSource, read_tensors, require_finite, resolve_directory
from runner.engine.errors import UserError
from runner.engine.memory import model_remedy, require_memory
from runner.engine.mtp_layout import is_mtp_tensor
from runner.engine.rope import pin_frequencies
from runner.engine.transformers_attention import ATTENTION_NAME, attention
from runner.engine.transformers_model import TransformersModel
from runner.engine.transformers_support import CONFIG_ERRORS, auto_class, quantization_method


def load_with_transformers(
    source: ModelSource, config: Any, *, device: torch.device, dtype: torch.dtype, max_model_len: int
) -> TransformersModel:
    """Load a model that `require_supported` let through.

    Raises:
        UserError: a corrupt or incomplete checkpoint, too little memory, or attention that is not replaceable.
    """
    from transformers import AttentionInterface

    AttentionInterface.register(ATTENTION_NAME, attention)
    config = copy.deepcopy(config)
    if hasattr(config, "output_router_logits"):
        config.output_router_logits = False  # a training loss would be computed from them
    try:
        with torch.device("meta"):
            num_bytes = sum(p.numel() * p.element_size() for p in _build(config, source, dtype).parameters())
    except CONFIG_ERRORS as error:
        raise UserError(
            f"{source.name}={source.model}: transformers cannot build a {config.model_type!r} model by its "
            f"config.json ({type(error).__name__}: {error}); mend it"
        ) from error
    require_memory(num_bytes, device, f"{source.name}={source.model}", model_remedy(dtype))
    if source.is_dummy:
        with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []), torch.device(device):
            torch.manual_seed(0)
            causal_model = _build(config, source, dtype)
    else:
        causal_model = _read(config, source, dtype, device)
        for name, parameter in causal_model.named_parameters():
            require_finite(parameter, name, source)
    pin_frequencies(causal_model, max_model_len)
    name = f"{source.name}={source.model}"
    return TransformersModel(causal_model.requires_grad_(False).eval(), config, name, max_model_len=max_model_len)


def _build(config: Any, source: ModelSource, dtype: torch.dtype) -> Any:
    """The model with the random weights of its own initialisation."""
    return auto_class().from_config(
        copy.deepcopy(config),
        attn_implementation=ATTENTION_NAME,
        dtype=dtype,
        trust_remote_code=source.trust_remote_code,
    )


def expanded(config: Any) -> dict[str, Any]:
    """Arguments of from_pretrained by which the weights come dense, of a checkpoint in MXFP4 too."""
    if quantization_method(config) != "mxfp4":
        return {}
    from transformers.utils.quantization_config import Mxfp4Config

    return {"quantization_config": Mxfp4Config(dequantize=True)}


def _read(config: Any, source: ModelSource, dtype: torch.dtype, device: torch.device) -> Any:
    """The model with the weights of its checkpoint, every one of them."""
    for _ in read_tensors(source):  # headers only: missing, pickled and corrupt files have their errors there
        pass
    try:
        causal_model, info = auto_class().from_pretrained(
            resolve_directory(source),
            config=config,
            attn_implementation=ATTENTION_NAME,
            dtype=dtype,
            device_map={"": device},
            use_safetensors=True,
            trust_remote_code=source.trust_remote_code,
            ignore_mismatched_sizes=True,  # reported below
            output_loading_info=True,
            **expanded(config),
        )
    except RuntimeError as error:
        if "conversion of the weights" not in str(error):  # tensors that belong together do not fit together
            raise
        info = {"missing_keys": [], "unexpected_keys": [], "mismatched_keys": [("some expert's weights",)]}
    problems = {
        "missing": sorted(info["missing_keys"]),
        "unexpected": sorted(name for name in info["unexpected_keys"] if not is_mtp_tensor(name, config)),
        "of another shape": sorted(str(entry[0]) for entry in info["mismatched_keys"]),
    }
    found = [f"{kind}: {', '.join(names[:4])}" for kind, names in problems.items() if names]
    if found:
        raise UserError(
            f"{source.name}={source.model}: the tensors do not match its config ({config.model_type}, "
            f"{config.num_hidden_layers} layers); {'; '.join(found)}; download the checkpoint again or mend its "
            "config.json"
        )
    return causal_model
