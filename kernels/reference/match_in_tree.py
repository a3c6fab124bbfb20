"""A draft tree that holds a match: the chain of what followed the same words before, and the rest of another tree.

The match is taken to be likelier than what the tree has beside it, so it comes first; what tree and match share stands
there once. (Suffix decoding, arXiv 2411.04975, and token recycling, arXiv 2408.08696, in one tree.)
"""

from __future__ import annotations

import torch
from torch import Tensor

from kernels.reference.likeliest_tree import Tree


def match_in_tree(match: Tensor, tree: Tree, *, depth: int) -> Tree:
    """A tree of as many nodes: those of the match in their order, then the tree's in theirs, until no place is left.

    So the first n of them are such a tree of n nodes.

    Args:
        match: [num_requests, num_nodes] int64, -1 behind the last token.
        tree: siblings are distinct tokens.
        depth: of the tree, at least.
    """
    num_requests, num_nodes = match.shape
    places = torch.arange(num_nodes, device=match.device).expand(num_requests, -1)
    is_matched = match >= 0
    num_matched = is_matched.sum(dim=1, keepdim=True)
    # Of each of the tree's nodes its number in the new tree, if it stands on the match's path.
    numbers = torch.full_like(places, -1)
    last = torch.full_like(num_matched, -1)  # the node that the match has come to; -2: it has left the tree
    for level in range(min(depth, num_nodes)):
        is_next = (tree.parents == last) & (tree.token_ids == match[:, level, None]) & is_matched[:, level, None]
        numbers = torch.where(is_next, level, numbers)
        last = torch.where(is_next, places, -2).amax(dim=1, keepdim=True)
    is_kept = (tree.token_ids >= 0) & (numbers < 0)
    numbers = torch.where(is_kept, num_matched + is_kept.cumsum(dim=1) - 1, numbers)
    of_parents = numbers.gather(1, tree.parents.clamp(min=0))
    of_parents = torch.where(tree.parents < 0, -1, of_parents)
    # One more place takes what is left over.
    where = torch.where(is_kept, numbers.clamp(max=num_nodes), num_nodes)
    found = []
    for own, others in ((match, tree.token_ids), (places - 1, of_parents)):
        own = torch.where(is_matched, own, -1)
        found.append(torch.nn.functional.pad(own, (0, 1)).scatter(1, where, others)[:, :num_nodes].contiguous())
    return Tree(*found)
