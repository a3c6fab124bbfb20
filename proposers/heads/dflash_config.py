"""What a DFlash config says, in z-lab's, in Meta's, in speculators' and in DeepSpec's words.

Hazard: z-lab's and DeepSpec's `target_layer_ids` number layers from 0 and mean the states after them, so 1 is added;
speculators' `aux_hidden_state_layer_ids`, vLLM's `dflash_config.layer_ids` and our method's key number hidden states.
Meta's assistants for Muse Glimmer name neither a vocabulary, which is the target's, nor who sees whom: all rows of a
block see each other. DeepSpec's DFlash heads are its DSpark model without a sequential head: every row guesses.
NVIDIA's for Nemotron 3.5 are of DeepSpec's class too, and say what differs: no row but the pending token's is silent,
heads have sinks, embeddings alone lie beside the layers (ModelOpt's words).
Heads of the family that are no DFlash ones (Domino, XPress, ...) are known by their keys; those of DSpark and DFlash 2
are read with these and some of their own (proposers/heads/dspark_config.py, dflash2_config.py).
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from proposers.heads.head_sizes import (
    head_flag,
    head_layer_ids,
    head_number,
    head_size,
    layer_windows,
    require_target_sizes,
)
from proposers.heads.mask_token import mask_token_id
from runner.engine.architecture import Architecture
from runner.engine.checkpoint import ModelSource
from runner.engine.errors import UserError
from runner.engine.families import GEMMA4_FAMILIES
from runner.engine.head_checkpoint import head_architecture
from runner.engine.layer_kinds import SLIDING
from runner.engine.loader import LoadedModel

logger = logging.getLogger(__name__)

GEMMA4_DEEPSPEC = "Gemma4DSparkModel"  # whose layers are the target's
DEEPSPEC = ("Qwen3DSparkModel", GEMMA4_DEEPSPEC)  # classes of its heads, DFlash's and DSpark's
ASSISTANT = "muse_glimmer_assistant"  # model_type of Meta's
CAP = "final_logit_softcapping"
SINKS_OF_MODELOPT, SINKS_OF_VLLM = "attention_sink_bias", "add_swa_attention_sink_bias"  # keys; the first counts
HALVES_KEYS = ("rope_is_neox_style", "is_neox_style")  # SGLang's, vLLM's; false: neighbours turn together
DEFAULT_BLOCK_SIZE = 16  # z-lab's, where the config has none
MIN_LAYERS_TO_SPREAD_OVER = 4  # of the target
# Keys of other kinds of heads, and the values with which a head is a plain one all the same.
FOREIGN_KEYS: dict[str, tuple[str, tuple[Any, ...]]] = {
    "conv_kernel_size": ("DFlash 2", (None, 0)),
    "conv_group_size": ("DFlash 2", (None, 0)),
    "selector_rank": ("DFlash 2", (None, 0)),
    "selector_top_k": ("DFlash 2", (None, 0)),
    "markov_rank": ("DSpark", (None, 0)),
    "markov_head_type": ("DSpark", (None,)),
    "enable_confidence_head": ("DSpark", (None, False)),
    "xpress_rank": ("XPress", (None, 0)),
    "projector_type": ("another projector (Domino, DSpark, LiLiCorr, XPress)", (None, "dflash")),
    "shift_label": ("Domino", (None, False)),
    "dspark_fixup_head_type": ("another sequential head", (None, "markov")),
    "swa_rope_theta": ("another base of rotations in windows", (None,)),
    "attention_value_scale": ("values of another scale", (None, 1.0)),
    "input_embedding_scale": ("embeddings of another scale than the target's", (None, 1.0)),
    "output_multiplier": ("logits of another scale than the target's", (None, 1.0)),
    CAP: ("capped logits", (None, 0)),
    "logit_scale": ("logits of another scale than the target's", (None, 1.0)),
    "use_aux_hidden_state": ("a context of one hidden state without fc", (None, True)),
}


@dataclass(frozen=True, kw_only=True)
class DFlashConfig:
    arch: Architecture  # of the head's layers; its logits_softcap is what the head's config says
    hf_config: Any
    tap_layers: tuple[int, ...]
    mask_token_id: int
    block_size: int  # rows of a block, that of the pending token included
    samples_from_anchor: bool  # the pending token's row guesses too, and every row the token behind its own place
    causal_layers: tuple[bool, ...]  # of each layer: a row of a block sees no row behind it
    draft_vocab_size: int
    # Ends of its own, where no checkpoint tells it (dummy weights).
    brings_embedding: bool
    brings_projection: bool

    @property
    def num_silent(self) -> int:
        """Rows of a block that guess nothing, its first."""
        return 0 if self.samples_from_anchor else 1

    @property
    def max_draft_tokens(self) -> int:
        return self.block_size - self.num_silent


def read_dflash_config(
    source: ModelSource,
    values: Mapping[str, Any],
    target: LoadedModel,
    aux_hidden_state_layer_ids: tuple[int, ...] | None,
    *,
    kind: str = "DFlash",
    kind_keys: Collection[str] = (),
    samples_from_anchor: bool = False,
    has_defaults: bool = True,
    brings_ends: bool = False,
    read_layers: Callable[[Mapping[str, Any], ModelSource], tuple[Architecture, Any]] | None = None,
) -> DFlashConfig:
    """The config of a head for this target.

    Args:
        aux_hidden_state_layer_ids: overrides the ids that it names.
        kind: what the head is to be.
        kind_keys: those of FOREIGN_KEYS that such a head has all the same, and are read elsewhere.
        samples_from_anchor: what holds where neither the config nor its layout says it.
        has_defaults: whether a config without a block size, or without ids, means z-lab's.
        brings_ends: embeddings and projection of its own, where neither a checkpoint nor the config tells it.
        read_layers: as head_architecture, of a kind whose layers are a family's of its own.

    Raises:
        UserError: a head of another kind or for another target, or ids that the target does not have.
    """
    if values.get("model_type") == ASSISTANT:
        values = {**values, "vocab_size": target.model.vocab_size, "is_causal": False}
    nested = values.get("dflash_config") or {}
    is_speculators, listed = "transformer_layer_config" in values, values.get("architectures") or ()
    is_deepspec = any(name in DEEPSPEC for name in listed)
    has_defaults = has_defaults and not is_deepspec
    _require_kind(source, values, nested, kind, kind_keys)
    layer_values = dict(values["transformer_layer_config"] if is_speculators else values)
    if read_layers is not None:
        arch, hf_config = read_layers(layer_values, source)
    elif GEMMA4_DEEPSPEC in listed:
        arch, hf_config = head_architecture(layer_values, source, GEMMA4_FAMILIES)
    else:
        _warn_of_partial_turns(source, layer_values)
        layer_values["model_type"] = "qwen3"  # whatever the target is, the layers are Qwen3's
        arch, hf_config = head_architecture(layer_values, source)
    own = with_nested(values)
    if _turns_neighbours(values, nested, source):
        arch = _with_neighbours_turned(arch)
    # As written: transformers' Qwen3 drops a window without use_sliding_window, which heads do not write.
    window = nested.get("swa_window_size", layer_values.get("sliding_window"))
    kinds = hf_config.layer_types
    if head_flag(own, "use_swa", source) and SLIDING not in kinds:  # vLLM's word for all of them
        kinds = [SLIDING] * arch.num_layers
    has_sinks = head_flag(own, SINKS_OF_MODELOPT, source, head_flag(own, SINKS_OF_VLLM, source, False))
    arch = replace(arch, sliding_windows=layer_windows(kinds, window, source), has_sinks=has_sinks)
    of_target = head_size(values, "target_hidden_size", arch.hidden_size, source, is_null_default=True)
    for hidden_size in (arch.hidden_size, of_target):
        num_layers = own.get("num_target_layers")
        require_target_sizes(source, target, hidden_size=hidden_size, vocab_size=arch.vocab_size, num_layers=num_layers)
    from_anchor = samples_from_anchor or is_deepspec
    from_anchor = _samples_from_anchor(own, source, from_anchor, says_bonus=is_deepspec or kind == "DSpark")
    spread = spread_layer_ids(target.model.num_layers, arch.num_layers) if has_defaults else None
    brings = brings_ends or is_deepspec
    return DFlashConfig(
        arch=arch,
        hf_config=hf_config,
        tap_layers=_taps_of_target(source, aux_hidden_state_layer_ids or tap_layers(source, values, spread), target),
        mask_token_id=mask_token_id(values, source, target.model.vocab_size),
        block_size=_block_size(source, values, nested, has_default=has_defaults, fewest=1 if from_anchor else 2),
        samples_from_anchor=from_anchor,
        causal_layers=_causal_layers(hf_config.layer_types, values, nested, source),
        draft_vocab_size=head_size(values, "draft_vocab_size", arch.vocab_size, source, is_null_default=True),
        brings_embedding=head_flag(own, "has_embed_tokens", source, brings),
        brings_projection=head_flag(own, "has_lm_head", source, brings),
    )


def _warn_of_partial_turns(source: ModelSource, layer_values: Mapping[str, Any]) -> None:
    ropes = (layer_values.get(key) or {} for key in ("rope_parameters", "rope_scaling"))
    shares = [part.get("partial_rotary_factor") for part in (layer_values, *ropes)]
    for share in dict.fromkeys(str(share) for share in shares if share not in (None, 1.0)):
        logger.warning(
            "%s=%s: partial_rotary_factor=%s is not read, as Qwen3's layers in transformers do not; vLLM turns such a "
            "part of its heads, so guesses differ",
            source.name,
            source.model,
            share,
        )


def _block_size(
    source: ModelSource, values: Mapping[str, Any], nested: Mapping[str, Any], *, has_default: bool, fewest: int
) -> int:
    """fewest: rows of which one guesses."""
    sizes = (nested.get("block_size"), values.get("block_size"), values.get("dspark_block_size"))
    found = next((size for size in sizes if size is not None), DEFAULT_BLOCK_SIZE if has_default else None)
    if type(found) is not int or found < fewest:
        raise UserError(
            f"{source.name}={source.model}: block_size must be a whole number >= {fewest}, got {found!r}; mend its "
            "config"
        )
    return found


def _taps_of_target(source: ModelSource, taps: tuple[int, ...], target: LoadedModel) -> tuple[int, ...]:
    if not all(0 <= tap <= target.model.num_layers for tap in taps):
        raise UserError(
            f"{source.name}={source.model} reads the target's hidden states {list(taps)}, which must lie in "
            f"[0, {target.model.num_layers}] (i = after i layers of {target.source.model}); choose the head of this "
            "target, or set method.aux_hidden_state_layer_ids"
        )
    return taps


def _samples_from_anchor(own: Mapping[str, Any], source: ModelSource, default: bool, *, says_bonus: bool) -> bool:
    """Whether the pending token's row guesses; dspark_bonus_anchor says the contrary, in vLLM's words of DSpark."""
    told = head_flag(own, "sample_from_anchor", source)
    bonus = head_flag(own, "dspark_bonus_anchor", source) if says_bonus else None
    if told is not None and told == bonus:
        raise UserError(
            f"{source.name}={source.model}: sample_from_anchor and dspark_bonus_anchor in its config must not be the "
            f"same, got {told!r} twice; mend it or download the head again"
        )
    if told is None and bonus is not None:
        told = not bonus
    return default if told is None else told


def _turns_neighbours(values: Mapping[str, Any], nested: Mapping[str, Any], source: ModelSource) -> bool:
    return any(head_flag(part, key, source) is False for part in (values, nested) for key in HALVES_KEYS)


def _with_neighbours_turned(arch: Architecture) -> Architecture:
    """Heads whose elements turn together with the next one, as LiquidAI's for LFM2.5 do."""
    heads = (replace(own, layout=replace(own.layout, is_interleaved=True)) for own in arch.heads)
    return replace(arch, heads=tuple(heads))


def with_nested(values: Mapping[str, Any]) -> Mapping[str, Any]:
    """A config whose own keys may also stand in its dflash_config, which counts before it."""
    return {**values, **(values.get("dflash_config") or {})}


def with_cap(config: DFlashConfig, values: Mapping[str, Any], source: ModelSource) -> DFlashConfig:
    """Whose head caps its logits as its config says.

    Raises:
        UserError: by something that is no number.
    """
    cap = head_number(with_nested(values), CAP, 0.0, source) or None
    return replace(config, arch=replace(config.arch, logits_softcap=cap))


def require_cap_of_target(config: DFlashConfig, source: ModelSource, target: LoadedModel) -> None:
    """For a head that uses the target's projection, which caps logits itself where it does.

    Raises:
        UserError: the head's config has a cap, and the target no such one.
    """
    cap, own = config.arch.logits_softcap, getattr(target.hf_config, CAP, None)
    if cap not in (None, own):
        raise UserError(
            f"{source.name}={source.model}: {CAP} in its config must be that of {target.source.model}, {own}, whose "
            f"projection it uses, got {cap}; choose the head of this target, or mend its config"
        )


def _require_kind(
    source: ModelSource,
    values: Mapping[str, Any],
    nested: Mapping[str, Any],
    kind: str,
    kind_keys: Collection[str],
) -> None:
    name = kind.lower().replace(" ", "")
    stated = values.get("speculators_model_type", name)
    found = [
        f"{key}={value!r} ({what})"
        for key, (what, plain) in FOREIGN_KEYS.items()
        if key not in kind_keys and (value := nested.get(key, values.get(key))) not in plain
    ]
    found = [f"speculators_model_type={stated!r}"] * (stated != name) + found
    if found:
        raise UserError(
            f"{source.name}={source.model} must be a plain {kind} head, got {', '.join(found)}; such heads have parts "
            f"that this method does not have: choose a {kind} one, or name the method that it was made for"
        )


def tap_layers(source: ModelSource, values: Mapping[str, Any], default: list[int] | None) -> tuple[int, ...]:
    """Hidden states that a config names, in the order in which vLLM and SGLang look for them.

    default: layers, numbered from 0, of a config that names none; those of speculators do.

    Raises:
        UserError: none named and no default, or something else than whole numbers.
    """
    nested = values.get("dflash_config") or {}
    places = [  # key, ids, what is to be added
        ("dflash_config.target_layer_ids", nested.get("target_layer_ids"), 1),
        ("dspark_target_layer_ids", values.get("dspark_target_layer_ids"), 1),
        ("target_layer_ids", values.get("target_layer_ids"), 1),
        ("dflash_config.layer_ids", nested.get("layer_ids"), 0),
    ]
    is_speculators = "transformer_layer_config" in values
    if is_speculators:
        places = [("aux_hidden_state_layer_ids", values.get("aux_hidden_state_layer_ids"), 0)]
    key, ids, offset = next((place for place in places if place[1] is not None), places[0])
    if ids is None and not is_speculators:
        ids = default
    return head_layer_ids(key, ids, offset, source)


def spread_layer_ids(num_target_layers: int, num_layers: int) -> list[int] | None:
    """Layers of the target, numbered from 0, that a z-lab head of num_layers reads when its config names none.

    None: the target has too few to spread over.
    """
    if num_target_layers < MIN_LAYERS_TO_SPREAD_OVER:
        return None
    if num_layers == 1:
        return [num_target_layers // 2]
    first, last = 1, num_target_layers - 3
    return [round(first + index * (last - first) / (num_layers - 1)) for index in range(num_layers)]


def _causal_layers(
    layer_types: Sequence[str], values: Mapping[str, Any], nested: Mapping[str, Any], source: ModelSource
) -> tuple[bool, ...]:
    """Layers that are sliding ones by their types are causal unless the config says otherwise, and the others not
    (z-lab, speculators)."""
    slides = [kind == SLIDING for kind in layer_types]
    if "transformer_layer_config" in values:
        sees_all = head_flag(values, "sliding_window_non_causal", source, False)
        return tuple(own and not sees_all for own in slides)
    told = head_flag(values, "is_causal", source, head_flag(nested, "causal", source))  # z-lab's key, vLLM's
    return tuple(slides if told is None else [told] * len(slides))
