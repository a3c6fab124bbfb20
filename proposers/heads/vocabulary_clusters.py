"""A projection to the vocabulary that goes to the likeliest clusters of its tokens alone (Gemma 4's small drafters).

Centroids say which clusters a state is near; only tokens of these get logits, some thousands of a large vocabulary.
Rows of the projection are kept cluster by cluster, so that a cluster is one piece of memory.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from kernels.cpu.panels import Change
from runner.engine.checkpoint import ModelSource
from runner.engine.draft_operations import cluster_logits
from runner.engine.errors import UserError
from runner.engine.linear import ColumnParallelLinear, WeightTarget
from runner.engine.shard import Shard

CENTROIDS, TOKEN_ORDERING = "masked_embedding.centroids", "masked_embedding.token_ordering"


@dataclass(frozen=True, kw_only=True)
class ClusterShapes:
    num_clusters: int  # each with as many tokens
    num_chosen: int  # for a row


class VocabularyClusters:
    def __init__(self, shapes: ClusterShapes, vocab_size: int, hidden_size: int, dtype: torch.dtype) -> None:
        """vocab_size: divisible by shapes.num_clusters."""
        self.num_chosen = shapes.num_chosen
        self.centroids = ColumnParallelLinear(
            hidden_size, {CENTROIDS: shapes.num_clusters}, bias=False, shard=Shard(), dtype=dtype
        )
        self.token_ids = torch.empty(shapes.num_clusters, vocab_size // shapes.num_clusters, dtype=torch.int64)

    def logits(self, states: torch.Tensor, rows: torch.Tensor, tile: int | None) -> torch.Tensor:
        """[num_rows, hidden] -> [num_rows, vocab] float32, kernels.reference.cluster_logits.OUTSIDE of other tokens.

        rows: [vocab, hidden], as `in_order` gives them.
        """
        chosen = self.centroids(states, tile).topk(self.num_chosen, dim=1).indices
        return cluster_logits(states, rows.view(*self.token_ids.shape, -1), self.token_ids, chosen)

    def convert(self, change: Change) -> None:
        """As Decoder.convert."""
        self.centroids.convert(change)

    def weight_targets(self) -> dict[str, WeightTarget]:
        ordering = WeightTarget(view=self.token_ids.view(-1))
        return {TOKEN_ORDERING: ordering, **self.centroids.weight_targets("")}

    def in_order(self, rows: torch.Tensor, source: ModelSource) -> torch.Tensor:
        """Rows of the projection [vocab, hidden] cluster by cluster, once both are filled.

        Raises:
            UserError: clusters that do not have each token once.
        """
        order, vocab_size = self.token_ids.view(-1), len(rows)
        if source.is_dummy:
            torch.arange(vocab_size, out=order)
        if not torch.equal(order.sort().values, torch.arange(vocab_size, device=order.device)):
            raise UserError(
                f"{source.name}={source.model}: {TOKEN_ORDERING} must hold each token id below {vocab_size} once, got "
                f"{len(set(order.tolist()))} different ids from {int(order.min())} to {int(order.max())}; download it "
                "again"
            )
        return rows.index_select(0, order)
