"""A draft vocabulary: the part of the target's tokens that a head's own projection knows.

Published as `d2t` [draft vocab] int64, an offset: token i of the draft vocabulary is token i + d2t[i] of the target's;
and `t2d` [vocab] bool, which tokens those are.
"""

from __future__ import annotations

import torch

from runner.engine.checkpoint import ModelSource
from runner.engine.errors import UserError


def target_ids(d2t: torch.Tensor, t2d: torch.Tensor | None, vocab_size: int, source: ModelSource) -> torch.Tensor:
    """[draft vocab] int64: the target's id of each token of the draft vocabulary.

    Raises:
        UserError: ids that are none of the target's, that occur twice, or that t2d does not name.
    """
    ids = d2t + torch.arange(len(d2t), device=d2t.device)
    num_different = len(torch.unique(ids))
    if int(ids.min()) < 0 or int(ids.max()) >= vocab_size or num_different != len(ids):
        raise UserError(
            f"{source.name}={source.model}: d2t must lead each token of the draft vocabulary to a token of its own "
            f"among the target's {vocab_size}, got ids from {int(ids.min())} to {int(ids.max())}, {num_different} of "
            f"{len(ids)} different; download the head again"
        )
    if t2d is not None and not torch.equal(t2d.to(ids.device).bool().nonzero()[:, 0], ids.sort().values):
        raise UserError(
            f"{source.name}={source.model}: t2d must mark the tokens that d2t leads to, got {int(t2d.sum())} marks "
            f"for {len(ids)} tokens, or others; download the head again"
        )
    return ids
