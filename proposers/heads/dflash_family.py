"""Heads that method=dflash runs, DFlash's own and those that grew out of it: the config says which one it is."""

from __future__ import annotations

from proposers.base import ProposerContext
from proposers.heads.dflash import DFlashHead, load_dflash_head
from proposers.heads.dflash2 import load_dflash2_head
from proposers.heads.dflash2_config import is_dflash2
from proposers.heads.domino import load_domino_head
from proposers.heads.domino_config import is_domino
from proposers.heads.laguna_dflash import load_laguna_head
from proposers.heads.laguna_dflash_config import is_laguna
from runner.engine.checkpoint import ModelSource
from runner.engine.head_checkpoint import read_head_config


def load_head_of_family(
    source: ModelSource,
    context: ProposerContext,
    max_model_len: int | None,
    aux_hidden_state_layer_ids: tuple[int, ...] | None,
) -> DFlashHead:
    """A SequentialBlockHead, or a head of one pass.

    Raises:
        UserError: no such head, another target's, or tensors that are not those of its config.
    """
    values = read_head_config(source)
    asked = source, context, max_model_len, aux_hidden_state_layer_ids
    if is_dflash2(values):
        return load_dflash2_head(*asked)
    if is_laguna(values):
        return load_laguna_head(*asked)
    return load_domino_head(*asked) if is_domino(values) else load_dflash_head(*asked)
