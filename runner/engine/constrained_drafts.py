"""What grammars make of one step's drafts: cut where a token is forbidden, carried on where only one is allowed.

Works on the host, depth by depth over all requests that follow a grammar, so that masks are computed in parallel.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field, replace
from itertools import accumulate, chain, pairwise

import numpy as np
import torch
from numpy.typing import NDArray

from kernels.reference.sampling import condition_on_bitmask
from runner.engine.grammar import Grammar, GrammarCompiler
from runner.engine.request import DraftTokens
from runner.engine.upload import to_device

SOURCE = "grammar"  # of a token that was the only one allowed, where sources are told


@dataclass(kw_only=True)
class Constrained:
    """One request of the step that follows a grammar."""

    place: int  # among the requests that yield a token; those that decode come first
    grammar: Grammar
    draft: list[int]  # token ids, in the end only what the grammar allows
    max_draft_tokens: int  # for which blocks are reserved
    is_random: bool  # not greedy: its drafts have probs, if any drafts have
    num_kept: int = 0  # of the proposer's tokens
    rows: list[int] = field(default_factory=list)  # of the bitmask: one for each draft left and one behind them


def follow(parts: Sequence[Constrained], compiler: GrammarCompiler) -> torch.Tensor:
    """Bring the parts' drafts into their grammars; returns the bitmask [num_rows, words] that their rows index.

    A place where one token is allowed has that token for sure, so a draft that ends there goes on with it.
    """
    levels: list[torch.Tensor] = []
    num_rows = 0
    for part in parts:
        part.grammar.unwind()
    ahead = list(parts)
    while ahead:
        bitmask = compiler.masks([part.grammar for part in ahead])
        levels.append(bitmask)
        went_on = []
        # Words are looked at one by one, which numpy does in a tenth of torch's time.
        for row, (part, allowed) in enumerate(zip(ahead, bitmask.numpy(), strict=True)):
            part.rows.append(num_rows + row)
            if _advance(part, allowed):
                went_on.append(part)
        num_rows += len(ahead)
        ahead = went_on
    for part in parts:
        part.grammar.unwind()
    return torch.cat(levels)


def keep_first_paths(drafts: DraftTokens, places: Collection[int]) -> DraftTokens:
    """The step's drafts with the trees of some requests cut to chains, of the first child at each node."""
    if drafts.parent_indices is None:
        return drafts
    index: list[int] = []
    parents: list[int] = []
    cu_num_draft_tokens = [0]
    for place, (start, shape) in enumerate(zip(drafts.cu_num_draft_tokens, drafts.shapes, strict=False)):
        nodes = shape.first_path if place in places else range(len(shape.parents))
        index += (start + node for node in nodes)
        parents += range(-1, len(nodes) - 1) if place in places else shape.parents
        cu_num_draft_tokens.append(len(index))
    if cu_num_draft_tokens != drafts.cu_num_draft_tokens:
        drafts = _gather(drafts, index, [], cu_num_draft_tokens)
    return replace(drafts, parent_indices=parents)


def apply_to(drafts: DraftTokens, parts: Sequence[Constrained], words: torch.Tensor) -> DraftTokens:
    """The step's drafts with those of the parts as their grammars left them.

    words: [sum of len(part.rows), words] int32 on the device, part by part. Distributions are conditioned on what the
    grammar allows: a draft that is cut where it leaves the grammar is a draw from that distribution, so every rule
    keeps what it promises.
    """
    starts = drafts.cu_num_draft_tokens
    kept = [list(range(start, end)) for start, end in pairwise(starts)]
    forced: list[int] = []
    for part in parts:
        if part.place < len(kept):
            new = part.draft[part.num_kept :]
            first_new = starts[-1] + len(forced)
            kept[part.place] = kept[part.place][: part.num_kept] + list(range(first_new, first_new + len(new)))
            forced += new
    cu_num_draft_tokens = [0, *accumulate(map(len, kept))]
    if forced or cu_num_draft_tokens != starts:
        parents = drafts.parents
        for part in parts:
            if part.place < len(kept):
                parents[part.place] = None
        drafts = _gather(drafts, list(chain.from_iterable(kept)), forced, cu_num_draft_tokens)
        if drafts.parent_indices is not None:
            trees = (range(-1, len(k) - 1) if own is None else own for k, own in zip(kept, parents, strict=True))
            drafts = replace(drafts, parent_indices=list(chain.from_iterable(trees)))
    if drafts.probs is None:
        return drafts
    draft_idx: list[int] = []
    row_idx: list[int] = []
    first_row = 0
    for part in parts:
        if part.is_random:
            draft_idx += [cu_num_draft_tokens[part.place] + depth for depth in range(len(part.draft))]
            row_idx += range(first_row, first_row + len(part.draft))
        first_row += len(part.rows)
    if not draft_idx:
        return drafts
    index = to_device([draft_idx, row_idx], torch.int64, drafts.probs.device)
    conditioned = condition_on_bitmask(drafts.probs.index_select(0, index[0]), words.index_select(0, index[1]))
    return replace(drafts, probs=drafts.probs.index_copy(0, index[0], conditioned))


def _advance(part: Constrained, allowed: NDArray[np.int32]) -> bool:
    """Judge the part's next token by its row, [words]; go on by it if it stays. False: the draft ends here."""
    depth = len(part.rows) - 1
    is_over = part.grammar.is_over
    token_id = -1 if is_over or depth >= len(part.draft) else part.draft[depth]  # -1: a place without a guess
    if token_id >= 0 and int(allowed[token_id // 32]) >> (token_id % 32) & 1:
        part.num_kept += 1
    else:
        del part.draft[depth:]
        only = _only_token(allowed) if depth < part.max_draft_tokens and not is_over else None
        if only is None:
            return False
        token_id = only
        part.draft.append(only)
    part.grammar.push(token_id)
    return True


def _only_token(allowed: NDArray[np.int32]) -> int | None:
    """The token of a row that allows one; None when it allows more."""
    (words,) = allowed.nonzero()
    if len(words) != 1:
        return None
    word = int(allowed[words[0]]) & 0xFFFFFFFF
    return None if word & (word - 1) else int(words[0]) * 32 + word.bit_length() - 1


def _gather(drafts: DraftTokens, index: list[int], forced: list[int], cu_num_draft_tokens: list[int]) -> DraftTokens:
    """drafts[index], where indices beyond the drafts are those of forced tokens."""
    token_ids, probs = drafts.token_ids, drafts.probs
    device = token_ids.device
    on_device = to_device(index, torch.int64, device)
    new = to_device(forced, torch.int64, device)
    if probs is not None:
        one_hot = torch.zeros(len(forced), probs.shape[1], dtype=probs.dtype, device=device)
        probs = torch.cat([probs, one_hot.scatter_(1, new.unsqueeze(1), 1.0)]).index_select(0, on_device)
    return replace(
        drafts,
        token_ids=torch.cat([token_ids, new]).index_select(0, on_device),
        cu_num_draft_tokens=cu_num_draft_tokens,
        probs=probs,
        sources=tuple((drafts.sources + (SOURCE,) * len(forced))[i] for i in index) if drafts.sources else (),
    )
