"""What a DFlash 2 config says beyond a DFlash one: its convolutions, its selector, and the scales of its two ends."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from proposers.heads.dflash_config import DFlashConfig, read_dflash_config, with_nested
from proposers.heads.head_sizes import head_number, head_size
from runner.engine.checkpoint import ModelSource
from runner.engine.errors import UserError
from runner.engine.head_checkpoint import read_head_config
from runner.engine.loader import LoadedModel

SIZES = ("conv_kernel_size", "conv_group_size", "selector_rank", "selector_top_k")
SCALES = ("input_embedding_scale", "output_multiplier", "final_logit_softcapping")


@dataclass(frozen=True, kw_only=True)
class DFlash2Config(DFlashConfig):
    num_taps: int  # rows of a block that a convolution's row sees, itself included
    group_size: int  # columns that share a row's own part of a tap
    selector_rank: int
    num_candidates: int  # tokens of a place that may be guessed there
    embedding_scale: float  # of the table's rows, whatever the target makes of them
    logit_scale: float  # of what the projection to the vocabulary gives, whatever the target makes of it
    logit_cap: float | None  # None: there is none


def is_dflash2(values: Mapping[str, Any]) -> bool:
    """Whether a config is of such a head; null and 0 switch its parts off."""
    own = with_nested(values)
    return any(own.get(key) for key in SIZES)


def read_dflash2_config(
    source: ModelSource, target: LoadedModel, aux_hidden_state_layer_ids: tuple[int, ...] | None
) -> DFlash2Config:
    """The config of a head for this target; aux_hidden_state_layer_ids overrides the ids that it names.

    Raises:
        UserError: a head of another kind or for another target, or sizes and scales that are none.
    """
    values = read_head_config(source)
    block = read_dflash_config(
        source, values, target, aux_hidden_state_layer_ids, kind="DFlash 2", kind_keys=(*SIZES, *SCALES)
    )
    own, hidden_size, vocab_size = with_nested(values), block.arch.hidden_size, block.arch.vocab_size
    # No default: what is not there is no size.
    num_taps, group_size, rank, num_candidates = (head_size(own, key, 0, source) for key in SIZES)
    if hidden_size % group_size:
        raise UserError(
            f"{source.name}={source.model}: conv_group_size in its config must divide its hidden_size ({hidden_size}), "
            f"got {group_size}; mend it or download the head again"
        )
    if num_candidates > vocab_size or block.draft_vocab_size != vocab_size:
        raise UserError(
            f"{source.name}={source.model}: selector_top_k and draft_vocab_size must be <= its vocabulary and "
            f"all of it ({vocab_size}), got {num_candidates} and {block.draft_vocab_size}; choose another head"
        )
    scales = {key: head_number(own, key, default, source) for key, default in zip(SCALES, (1.0, 1.0, 0.0), strict=True)}
    return DFlash2Config(
        **{name: getattr(block, name) for name in DFlashConfig.__dataclass_fields__},
        num_taps=num_taps,
        group_size=group_size,
        selector_rank=rank,
        num_candidates=num_candidates,
        embedding_scale=scales["input_embedding_scale"],
        logit_scale=scales["output_multiplier"],
        logit_cap=scales["final_logit_softcapping"] or None,
    )
