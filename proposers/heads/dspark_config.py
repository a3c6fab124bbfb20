"""What a DSpark config says beyond a DFlash one: the sequential head and the confidence head.

Hazard: DeepSpec's `target_layer_ids` number layers from 0, as z-lab's do, and its heads say nothing of
sample_from_anchor: every row of a block guesses, the pending token's too. Block size and ids have no default, and may
be spelled `dspark_block_size` and `dspark_target_layer_ids` (vLLM's words). LiquidAI's for LFM2.5 use the target's
embeddings and projection, and neighbours turn together in their heads.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from proposers.heads.dflash_config import CAP, DFlashConfig, read_dflash_config, with_cap, with_nested
from proposers.heads.head_sizes import head_size
from proposers.heads.markov import KINDS
from runner.engine.checkpoint import ModelSource
from runner.engine.errors import UserError
from runner.engine.head_checkpoint import read_head_config
from runner.engine.loader import LoadedModel

KEYS = ("markov_rank", "markov_head_type", "enable_confidence_head", CAP)
DEFAULT_RANK = 256  # speculators', where the config has none
PROJECTOR_TYPE = "dspark"  # SpecForge's word for such a head


@dataclass(frozen=True, kw_only=True)
class DSparkConfig(DFlashConfig):
    markov_rank: int
    markov_head_type: str
    has_confidence_head: bool
    confidence_head_with_markov: bool  # it reads the embedding of the token before, beside the hidden state


def read_dspark_config(
    source: ModelSource, target: LoadedModel, aux_hidden_state_layer_ids: tuple[int, ...] | None
) -> DSparkConfig:
    """The config of a head for this target; aux_hidden_state_layer_ids overrides the ids that it names.

    Raises:
        UserError: a head of another kind or for another target, or one without a sequential head.
    """
    values = read_head_config(source)
    own = with_nested(values)
    is_specforge = own.get("projector_type") == PROJECTOR_TYPE
    kind_keys = (*KEYS, "projector_type") if is_specforge else KEYS
    block = read_dflash_config(
        source,
        values,
        target,
        aux_hidden_state_layer_ids,
        kind="DSpark",
        kind_keys=kind_keys,
        samples_from_anchor=True,
        has_defaults=False,
        brings_ends="transformer_layer_config" not in values and "dflash_config" not in values,
    )
    block = with_cap(block, values, source)
    is_speculators = "transformer_layer_config" in values
    kind = str(own.get("markov_head_type", "vanilla")).lower()
    if kind not in KINDS:
        raise UserError(
            f"{source.name}={source.model}: markov_head_type must be one of {', '.join(KINDS)}, got {kind!r}; choose "
            "another head"
        )
    return DSparkConfig(
        **{name: getattr(block, name) for name in DFlashConfig.__dataclass_fields__},
        markov_rank=_markov_rank(own, DEFAULT_RANK if is_speculators else None, source),
        markov_head_type=kind,
        has_confidence_head=bool(own.get("enable_confidence_head", is_speculators)),
        confidence_head_with_markov=bool(own.get("confidence_head_with_markov", True)),
    )


def _markov_rank(own: Mapping[str, Any], default: int | None, source: ModelSource) -> int:
    """Raises UserError for a head without a sequential head, and for a rank that is none."""
    if not own.get("markov_rank", default):
        raise UserError(
            f"{source.name}={source.model} must have a sequential head, got markov_rank={own.get('markov_rank')!r} in "
            "its config; choose a head that has one, or set method=dflash, which runs DeepSpec's without one"
        )
    return head_size(own, "markov_rank", default or 0, source)
