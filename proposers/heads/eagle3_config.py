"""What an EAGLE-3 config says, in SafeAILab's, SpecForge's, ModelOpt's, speculators' and DeepSpec's words.

Hazard: ids of the hidden states mean different things. In `eagle_config.eagle_aux_hidden_state_layer_ids` (SpecForge,
ModelOpt) and `target_layer_ids` (DeepSpec) they number layers from 0 and mean the states after them, so 1 is added; in
`eagle_aux_hidden_state_layer_ids` at the top level (speculators) and `eagle_config.layer_ids` they number hidden
states, as vLLM reads both. method.aux_hidden_state_layer_ids does too.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from proposers.heads.eagle_layer import eagle_architecture
from proposers.heads.head_sizes import head_layer_ids, head_size, layer_windows
from proposers.heads.mask_token import KEYS as MASK_TOKEN_KEYS
from proposers.heads.mask_token import mask_token_id
from runner.engine.architecture import Architecture
from runner.engine.checkpoint import ModelSource
from runner.engine.errors import UserError
from runner.engine.hidden_states import NORMED
from runner.engine.loader import LoadedModel

# What ModelOpt can write into eagle_config, and the one value that our layers have.
FIXED_EAGLE_CONFIG = {
    "use_input_layernorm_in_first_layer": True,
    "use_last_layernorm": True,
    "use_mtp_layernorm": False,
    "parallel_draft_step": 1,
}


@dataclass(frozen=True, kw_only=True)
class Eagle3Config:
    arch: Architecture  # of the head's layers; vocab_size is the target's
    hf_config: Any
    tap_layers: tuple[int, ...]
    target_hidden_size: int
    draft_vocab_size: int
    has_fc: bool
    norm_before_residual: bool  # the state is normed before layer 0 adds to it
    norm_before_fc: bool  # one norm over the tapped states side by side
    fc_norm: bool  # a norm for each of them
    norm_output: bool  # what is fed back is normed (EAGLE-3.1)
    brings_ends: bool  # embeddings and projection of its own, where no checkpoint tells it (dummy weights)
    mask_token_id: int | None  # of a head that drafts in one pass (P-EAGLE); None: token by token


def read_eagle3_config(
    source: ModelSource,
    values: Mapping[str, Any],
    target: LoadedModel,
    aux_hidden_state_layer_ids: tuple[int, ...] | None,
) -> Eagle3Config:
    """The config of a head for this target; aux_hidden_state_layer_ids overrides the ids that it names.

    Raises:
        UserError: a head of another kind, options that our layers do not have, ids that the target does not have.
    """
    kind = values.get("speculators_model_type", "eagle3")
    if kind not in ("eagle3", "peagle"):
        raise UserError(
            f"{source.name}={source.model} must be an EAGLE-3 head, got speculators_model_type {kind!r}; "
            "name the method that it was made for"
        )
    is_parallel = kind == "peagle" or any(values.get(key) is not None for key in MASK_TOKEN_KEYS)
    layer_values = values.get("transformer_layer_config", values)
    arch, hf_config = eagle_architecture(layer_values, source)
    if layer_types := layer_values.get("layer_types"):  # speculators gives Llama layers windows too
        windows = layer_windows(layer_types, layer_values.get("sliding_window"), source)
        arch = replace(arch, sliding_windows=windows)
    nested = values.get("eagle_config") or {}
    _require_known(source, nested)
    # Without norm_before_residual it is False, as in speculators and SafeAILab's code; vLLM takes True for a config of
    # the speculators format that lacks it.
    flags = {
        name: bool(values.get(name, nested.get(name, False)))
        for name in ("norm_before_residual", "norm_before_fc", "fc_norm", "norm_output")
    }
    has_fc = bool(nested.get("use_aux_hidden_state", True))
    ids = aux_hidden_state_layer_ids or _layer_ids(source, values, nested, target.model.num_layers)
    if not all(0 <= index <= target.model.num_layers for index in ids):
        raise UserError(
            f"{source.name}={source.model}: hidden states must be numbered 0 to {target.model.num_layers}, the layers "
            f"of {target.source.model}, got {list(ids)}; name them with method.aux_hidden_state_layer_ids"
        )
    return Eagle3Config(
        arch=arch,
        hf_config=hf_config,
        tap_layers=ids if has_fc else (NORMED,),
        target_hidden_size=head_size(values, "target_hidden_size", arch.hidden_size, source, is_null_default=True),
        draft_vocab_size=head_size(values, "draft_vocab_size", arch.vocab_size, source, is_null_default=True),
        has_fc=has_fc,
        brings_ends="ttt_length" in values,  # DeepSpec's
        mask_token_id=mask_token_id(values, source, arch.vocab_size) if is_parallel else None,
        **flags,
    )


def _layer_ids(
    source: ModelSource, values: Mapping[str, Any], nested: Mapping[str, Any], num_layers: int
) -> tuple[int, ...]:
    places = (  # key, ids, what is to be added
        ("eagle_aux_hidden_state_layer_ids", values.get("eagle_aux_hidden_state_layer_ids"), 0),
        ("aux_hidden_state_layer_ids", values.get("aux_hidden_state_layer_ids"), 0),
        ("eagle_config.eagle_aux_hidden_state_layer_ids", nested.get("eagle_aux_hidden_state_layer_ids"), 1),
        ("target_layer_ids", values.get("target_layer_ids"), 1),
        ("eagle_config.layer_ids", nested.get("layer_ids"), 0),
    )
    for key, ids, offset in places:
        if ids not in (None, []):  # ModelOpt writes an empty list where it means these
            return head_layer_ids(key, ids, offset, source)
    return (2, num_layers // 2, num_layers - 3)


def _require_known(source: ModelSource, nested: Mapping[str, Any]) -> None:
    for name, value in FIXED_EAGLE_CONFIG.items():
        if nested.get(name, value) != value:
            raise UserError(
                f"{source.name}={source.model}: eagle_config.{name} must be {value}, got {nested[name]}: heads of "
                "another build are not supported; choose one without that option"
            )
