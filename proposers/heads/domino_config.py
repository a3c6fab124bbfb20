"""What a Domino config says beyond a DFlash one: the GRU that corrects the block's logits.

Hazard: with shift_label every row of a block guesses the token behind its own place, the pending token's row too.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from proposers.heads.dflash_config import DFlashConfig, read_dflash_config, with_nested
from proposers.heads.head_sizes import head_size
from runner.engine.checkpoint import ModelSource
from runner.engine.errors import UserError
from runner.engine.head_checkpoint import read_head_config
from runner.engine.loader import LoadedModel

PROJECTOR_TYPE = "domino"


@dataclass(frozen=True, kw_only=True)
class DominoConfig(DFlashConfig):
    state_size: int  # of the GRU
    rank: int  # of what is added to the logits
    num_uncorrected: int  # guesses of a block, its first, to which nothing is added


def is_domino(values: Mapping[str, Any]) -> bool:
    """Whether a config is of such a head; its class may stand for the word."""
    projector = with_nested(values).get("projector_type")
    return projector == PROJECTOR_TYPE or (
        projector is None and "DominoDraftModel" in (values.get("architectures") or ())
    )


def read_domino_config(
    source: ModelSource, target: LoadedModel, aux_hidden_state_layer_ids: tuple[int, ...] | None
) -> DominoConfig:
    """The config of a head for this target; aux_hidden_state_layer_ids overrides the ids that it names.

    Raises:
        UserError: a head of another kind or for another target, or sizes that are none.
    """
    values = read_head_config(source)
    own = with_nested(values)
    block = read_dflash_config(
        source,
        values,
        target,
        aux_hidden_state_layer_ids,
        kind="Domino",
        kind_keys=("projector_type", "shift_label"),
        samples_from_anchor=bool(own.get("shift_label", False)),
    )
    if block.draft_vocab_size != block.arch.vocab_size:
        raise UserError(
            f"{source.name}={source.model}: draft_vocab_size in its config must be its vocabulary "
            f"({block.arch.vocab_size}) for a Domino head, got {block.draft_vocab_size}; choose another head"
        )
    return DominoConfig(
        **{name: getattr(block, name) for name in DFlashConfig.__dataclass_fields__},
        state_size=head_size(own, "gru_hidden_dim", 0, source),
        rank=head_size(own, "emb_dim", 0, source),
        num_uncorrected=head_size(own, "pure_draft_prefix_len", 0, source, minimum=0),
    )
