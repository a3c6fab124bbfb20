"""DFlash 2's selector: of each place's likeliest tokens, the one that goes with the token before it.

A pair of tokens is worth a sum over the parts of their codes, each weighed by the place's hidden state. That is added
to the candidate's own logit; tokens that are no candidates of a place have no chance there.
"""

from __future__ import annotations

import torch

from kernels.cpu.panels import Change
from kernels.reference.softcap import softcap
from proposers.heads.sequential import SequentialHead
from proposers.trees.candidates import top_candidates
from runner.engine.draft_operations import candidate_logits
from runner.engine.linear import ColumnParallelLinear, WeightTarget
from runner.engine.shard import Shard


class CandidateSelector(SequentialHead):
    has_state = False

    def __init__(
        self,
        *,
        num_candidates: int,
        rank: int,
        hidden_size: int,
        vocab_size: int,
        logit_scale: float,  # of a candidate's own logit
        logit_cap: float | None,  # of what comes of it; None: there is none
        dtype: torch.dtype,
    ) -> None:
        self.num_candidates, self.logit_scale, self.logit_cap = num_candidates, logit_scale, logit_cap
        self.predecessors, self.successors = (torch.empty(vocab_size, rank, dtype=dtype) for _ in range(2))
        self.projection = ColumnParallelLinear(
            hidden_size, {"hidden_projection": rank}, bias=False, shard=Shard(), dtype=dtype
        )

    def first_state(self, silent: torch.Tensor | None, token_ids: torch.Tensor, tile: int | None) -> None:
        return None

    def places(self, hidden: torch.Tensor, logits: torch.Tensor, tile: int | None) -> tuple[torch.Tensor, ...]:
        candidates = top_candidates(logits, self.num_candidates).token_ids
        unary = logits.gather(1, candidates)
        if self.logit_scale != 1.0:
            unary = unary * self.logit_scale
        if self.logit_cap is not None:
            unary = softcap(unary, self.logit_cap)
        return unary, candidates, self.projection(hidden, tile)

    def guess(
        self,
        place: int,
        places: tuple[torch.Tensor, ...],
        state: torch.Tensor | None,
        token_ids: torch.Tensor,
        tile: int | None,
    ) -> tuple[torch.Tensor, None]:
        unary, candidates, hidden = places
        return candidate_logits(unary, candidates, hidden, self.predecessors, self.successors, token_ids), None

    def convert(self, change: Change) -> None:
        self.projection.convert(change)

    def weight_targets(self, prefix: str) -> dict[str, WeightTarget]:
        return {
            f"{prefix}predecessor_codebook": WeightTarget(view=self.predecessors),
            f"{prefix}successor_codebook": WeightTarget(view=self.successors),
            **self.projection.weight_targets(prefix),
        }
