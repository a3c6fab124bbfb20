"""What the target last held likely behind each token, on the device: the adjacency matrix of token recycling."""

from __future__ import annotations

import torch
from torch import Tensor

from kernels.reference.likeliest_tree import Tree, TreeCandidates
from proposers.trees.candidates import top_candidates
from runner.engine.operations import take_rows
from runner.engine.step_operations import add_level, likeliest_tree, remember_candidates

WIDTH = 8  # candidates of a token, as in the paper


class CandidateTable:
    """12 bytes a candidate, WIDTH of every token of the vocabulary, in tensors that stay in place."""

    def __init__(self, *, vocab_size: int, device: torch.device) -> None:
        self.width = min(WIDTH, vocab_size)
        # The last row takes what is written for nobody.
        self.token_ids = torch.zeros(vocab_size + 1, self.width, dtype=torch.int64, device=device)
        self.log_probs = torch.empty(vocab_size + 1, self.width, dtype=torch.float32, device=device)
        self.clear()

    def clear(self) -> None:
        """Nothing is likely behind any token."""
        self.token_ids.zero_()
        self.log_probs.fill_(float("-inf"))

    def learn(self, token_ids: Tensor, logits: Tensor) -> None:
        """token_ids: [num_rows] int64, -1: nobody's; logits: [num_rows, vocab] float32 behind each."""
        found = top_candidates(logits, self.width)
        remember_candidates(self.token_ids, self.log_probs, token_ids, *found)

    def trees(self, last_token_ids: Tensor, *, num_nodes: int, depth: int, width: int | None = None) -> Tree:
        """The likeliest nodes behind each of last_token_ids [count], by the product of what is known along a path.

        width: candidates of a token, and tokens of a level, that are looked at; 1 makes chains. A node's probability
        is that of the context in which its parent was last seen, not of this one.
        """
        count, width, num_rows = len(last_token_ids), num_nodes if width is None else width, 1
        own = min(width, self.width)
        tree = TreeCandidates.unwritten(count, depth, num_nodes, last_token_ids.device)
        rows = last_token_ids
        for level in range(depth):
            candidates = (take_rows(table, rows)[:, :own].contiguous() for table in (self.token_ids, self.log_probs))
            num_next = min(width, num_nodes) if level + 1 < depth else 0
            rows = add_level(tree, level, *candidates, num_rows=num_rows, num_next=num_next).token_ids
            num_rows = num_next
        return likeliest_tree(tree, num_nodes)
