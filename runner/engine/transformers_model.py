"""Any other decoder that transformers supports, run by its own modelling code over our paged KV cache.

Our attention is registered under a name of its own; the model hands it queries, keys and values after rope, and
the launch travels through as a keyword argument. Rows are not independent of the launch here (the modules are not
ours), so the bitwise promise is off.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from kernels.reference.paged_attention import paged_attention
from runner.engine.checkpoint import ModelSource, resolve_directory
from runner.engine.errors import UserError
from runner.engine.forward_batch import ForwardBatch
from runner.engine.kv_cache import PagedKVCache
from runner.engine.memory import require_memory
from runner.engine.rope import require_static_rope

ATTENTION_NAME = "speculative_paged"


def require_supported(config: Any, source: ModelSource) -> None:
    """Raises UserError, with the reason, for a model that cannot run over our cache."""
    from transformers import AutoModelForCausalLM

    text_config = config.get_text_config(decoder=True)
    try:
        model_class = AutoModelForCausalLM._model_mapping[type(config)]
    except KeyError:
        raise UserError(
            f"{source.name}={source.model}: model_type {config.model_type!r} is no causal language model of transformers; "
            "choose a decoder-only model"
        ) from None
    if not model_class._supports_attention_backend:
        raise UserError(
            f"{source.name}={source.model}: {model_class.__name__} does not let its attention be replaced "
            "(_supports_attention_backend is false), so it cannot use a paged KV cache; choose another model"
        )
    kinds = set(getattr(text_config, "layer_types", None) or ()) - {"full_attention", "sliding_attention"}
    if kinds:
        raise UserError(
            f"{source.name}={source.model}: layers of type {', '.join(sorted(kinds))} keep a state that is no "
            "key-value cache; choose a model with attention layers only"
        )
    require_static_rope(text_config)


class TransformersModel(nn.Module):
    """The interface of runner.engine.decoder.Decoder over a transformers model."""

    is_row_invariant = False

    @classmethod
    def load(
        cls, source: ModelSource, config: Any, *, device: torch.device, dtype: torch.dtype, max_model_len: int
    ) -> TransformersModel:
        raise NotImplementedError
