"""Which models of transformers can run over our paged KV cache, told by their config; the reason where one cannot.

What a config does not tell, a probing pass finds out after loading (runner.engine.transformers_attention.Probe).
"""

from __future__ import annotations

from typing import Any

from runner.engine.checkpoint import ModelSource, resolve_directory, stated_quantization
from runner.engine.errors import UserError
from runner.engine.families import FAMILIES
from runner.engine.rope import require_static_rope
from runner.engine.text_part import WITH_TEXT_PART

# What transformers' code raises where a config lacks a value, or has two that do not go together.
CONFIG_ERRORS = (AttributeError, IndexError, KeyError, RuntimeError, TypeError, ValueError)


def require_supported(config: Any, source: ModelSource) -> None:
    """Raises UserError, with the reason, for a model whose config says that it cannot run over our cache."""
    refusal = _refusal(config, _model_class(config, source)) or _quantization_refusal(source)
    if refusal is not None:
        raise UserError(f"{source.name}={source.model}: model_type {config.model_type!r} {refusal}")
    require_static_rope(config)


def _refusal(config: Any, model_class: Any) -> str | None:
    kinds = sorted(set(getattr(config, "layer_types", None) or ()) - {"full_attention", "sliding_attention"})
    if getattr(config, "is_encoder_decoder", False):
        return "is an encoder-decoder; choose a decoder-only model"
    if config.get_text_config(decoder=True) is not config:
        kind = config.get_text_config(decoder=True).model_type
        return (
            f"takes more than text, and a language model in it is read of {', '.join(WITH_TEXT_PART)}, where it runs "
            f"on our own decoder; its is {kind!r}; choose another checkpoint, or a text-only one"
        )
    if getattr(config, "num_hidden_layers", 1) < 1:
        return f"has {config.num_hidden_layers} layers; mend num_hidden_layers in its config.json"
    if model_class is None:
        return "is no causal language model of transformers; choose a decoder-only model"
    if kinds or model_class._is_stateful:
        which = f"of type {', '.join(kinds)}" if kinds else "of a recurrent kind"
        is_recurrent = model_class._is_stateful or not {"linear_attention", "conv"}.isdisjoint(kinds)
        why = " and cannot roll back yet what rejected drafts, MTP's or any other's, left in it" if is_recurrent else ""
        remedy = (
            "our own decoder runs this family as it is published, and its config.json is another: choose such a one"
            if config.model_type in FAMILIES
            else "choose a model of attention layers only"
        )
        return f"has layers {which}, whose state is no key-value cache{why}; {remedy}"
    if not model_class._supports_attention_backend:
        return (
            "does not let its attention be replaced "
            f"({model_class.__name__}._supports_attention_backend is false); choose another model"
        )
    return None


def _quantization_refusal(source: ModelSource) -> str | None:
    stated = stated_quantization(source)
    method = None if stated is None else stated.get("quant_method")
    if stated is None or method == "mxfp4":
        return None
    return f"is quantized ({method}), and only mxfp4 is expanded on loading; choose an unquantized checkpoint"


def auto_class() -> Any:
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM


def sliding_layers(config: Any) -> frozenset[int]:
    has_window = getattr(config, "sliding_window", None) is not None and getattr(config, "use_sliding_window", True)
    default = ["sliding_attention" if has_window else "full_attention"] * config.num_hidden_layers
    kinds = getattr(config, "layer_types", None) or default
    return frozenset(index for index, kind in enumerate(kinds) if kind == "sliding_attention")


def quantization_method(config: Any) -> str | None:
    quantization = getattr(config, "quantization_config", None)
    if quantization is None:
        return None
    return str(quantization["quant_method"] if isinstance(quantization, dict) else quantization.quant_method)


def _model_class(config: Any, source: ModelSource) -> Any:
    """The class that would be built; None when there is none."""
    from transformers.dynamic_module_utils import get_class_from_dynamic_module

    reference = (getattr(config, "auto_map", None) or {}).get("AutoModelForCausalLM")
    if source.trust_remote_code and reference is not None:
        return get_class_from_dynamic_module(reference, resolve_directory(source, weights=False))
    mapping = auto_class()._model_mapping
    return mapping[type(config)] if type(config) in mapping.keys() else None  # noqa: SIM118 - lazy, no dict
