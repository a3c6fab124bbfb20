"""What a speculation method is: something that guesses the next tokens of running requests.

A new method is one file in this folder, named as its `method` key, with one subclass of Proposer in it.
"""

from __future__ import annotations

import importlib
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import torch

from proposers.captured.drafter import CapturedDrafter, NoDrafts
from proposers.captured.host_drafts import HostDrafts
from runner.engine.errors import UserError
from runner.engine.grammar_store import GrammarStore
from runner.engine.graphs import GraphMemory
from runner.engine.hidden_states import NORMED
from runner.engine.kv_cache import PagedKVCache
from runner.engine.loader import LoadedModel
from runner.engine.model_runner import ModelRunner
from runner.engine.request import DraftTokens, Request, VerifyOutput
from runner.engine.schedule import Schedule
from runner.engine.upload import to_device


@dataclass(frozen=True, kw_only=True)
class ProposerContext:
    """What the engine tells a proposer about itself."""

    vocab_size: int
    max_model_len: int  # tokens, of the target
    max_num_seqs: int  # requests running at the same time
    max_num_batched_tokens: int  # of a step of prompts: memory is measured for passes of so many rows
    eos_token_ids: tuple[int, ...]
    block_size: int  # tokens a KV block holds; one block table serves target and draft
    device: torch.device
    dtype: torch.dtype
    batch_invariant: bool
    needs_draft_probs: bool  # the verification rule reads the distribution q each draft was drawn from
    # The rule looks at drafts beyond its cut, so no step may draw with noise of an earlier one: the step's key is the
    # number of committed tokens at its start, Request.num_tokens.
    keys_by_draft_step: bool = False
    kv_dtype: torch.dtype | None = None  # of keys and values in caches; None: dtype
    # Drafts of a request in a step, where others than this proposer draft too; None: its own num_speculative_tokens.
    max_draft_tokens: int | None = None
    graph_memory: GraphMemory | None = None  # of passes that are captured as graphs; None: none are
    grammars: GrammarStore = field(default_factory=GrammarStore)  # a drafter with logits walks them
    target: LoadedModel | None = None  # draft heads share its embedding and its head
    target_runner: ModelRunner | None = None  # it has a cache before allocate_cache

    @property
    def has_states(self) -> bool:
        """Whether layers of the target have states, which follow one path of tokens: drafts are chains."""
        return self.target is not None and self.target.model.is_recurrent

    def cache_of_target(self) -> PagedKVCache:
        """What drafters without keys of their own see, from allocate_cache on."""
        cache = None if self.target_runner is None else self.target_runner.cache
        assert cache is not None, "the target's is allocated first"
        return cache


class Proposer(ABC):
    """Guesses tokens. Reads requests, never writes them; keeps what it knows by request_id.

    One step: `propose` before verification, `update` after its result is committed. `release` comes when a request
    finishes, and when it is preempted: it will then come back from its first token or, as any request may begin, from
    behind those that are found in the cache (`fills_blocks`).
    """

    # Whether `propose` gives drafts without probs and needs the committed tokens alone: then steps run whole between
    # its calls, of which some may be left out. Those of a class with an `update` of its own do not. The drafts are
    # chains, unless drafts_trees says otherwise.
    drafts_from_text: bool = False
    # Whether `update` finds in `output.judged` the target's logits behind every token that was verified.
    reads_logits: bool = False
    # Whether `update` reads the states of tap_layers of every token. False: of a prompt's tokens in a step those of the
    # last one alone, so that the others need not go through layers of the target behind which nothing is stored.
    taps_every_token: bool = True

    @classmethod
    def build(cls, **keys: Any) -> Proposer:
        """The proposer of a method with these arguments; where its checkpoints are of several kinds, theirs."""
        return cls(**keys)

    def __init__(self, *, num_speculative_tokens: int, context: ProposerContext) -> None:
        self.num_speculative_tokens = num_speculative_tokens
        self.context = context

    @property
    def name(self) -> str:
        """What errors call it."""
        return type(self).__name__

    @abstractmethod
    def propose(self, schedule: Schedule) -> DraftTokens:
        """Guesses for `schedule.decoding`, in that order; at most `max_draft_tokens` each, none is fine."""

    def update(self, schedule: Schedule, output: VerifyOutput) -> None:  # noqa: B027 - optional
        """Learn from a step; its tokens are committed, requests that ended have given back their blocks.

        What was verified need not be what was proposed: a grammar cuts drafts and puts forced tokens behind them. A
        drafter that does not walk `context.grammars` must compare tokens, not count accepted ones.
        """

    def keep_up(self, requests: Sequence[Request]) -> None:  # noqa: B027 - optional
        """Somebody else drafted for these in the last step: compute now what they would have to be computed later.

        Comes behind `update`; none of the requests has ended.
        """

    def release(self, request_id: str) -> None:  # noqa: B027 - optional
        """Forget a request."""

    def fills_blocks(self, request: Request) -> bool:
        """Whether `update` puts into the blocks of this request's prompt all that drafting from them needs.

        Then requests whose prompts begin alike share them, and start behind them: no step brings those tokens again.
        Asked once the request's step is over, when it may have ended, and before, whether others should wait for it.
        Blocks are known by their tokens and the next one (runner/engine/prefix_cache.py), so what is kept at a position
        may depend on these and all earlier ones.
        """
        return self.cache_bytes_per_block == 0 and not self.tap_layers

    def captured_drafter(self, num_tokens: int) -> CapturedDrafter | None:
        """Its drafting as something that can be captured with a whole step; None: the host takes part in it.

        Steps of that form call neither `propose` nor `update`; those with `drafts_from_text` do call `propose`, and
        others what their CapturedDrafter.find calls. They may come and go with the load.

        Args:
            num_tokens: drafts of every request, at most num_speculative_tokens; 0 where the load allows none.
        """
        if self.num_speculative_tokens == 0 or (num_tokens == 0 and self.drafts_from_text):
            return NoDrafts()
        if not self.drafts_from_text or type(self).update is not Proposer.update:
            return None

        def propose(schedule: Schedule) -> DraftTokens:
            drafts = self.propose(schedule)
            check_drafts(self, schedule, drafts)
            rule, is_kept = "draft chains without probs, as drafts_from_text says", not drafts.has_branches
            if self.drafts_trees:
                rule = "draft trees without probs, as drafts_from_text and drafts_trees say"
                is_kept = drafts.parent_indices is not None or len(drafts.token_ids) == 0
            if drafts.probs is not None or not is_kept:
                raise UserError(f"{self.name}.propose must {rule}, got {drafts}; mend the proposer")
            return drafts

        return HostDrafts(
            num_tokens,
            propose=propose,
            are_trees=self.drafts_trees,
            capacity=self.context.max_num_seqs,
            device=self.context.device,
        )

    def most_drafts(self, num_own: int) -> int:
        """Of a request in a step, where this proposer makes so many: it learns from others' drafts too."""
        return max(num_own, self.context.max_draft_tokens or 0)

    def restart(self) -> None:  # noqa: B027 - optional
        """Back to what it knew when it was built: forget requests that are over. Comes before whatever is measured."""

    @property
    def drafts_trees(self) -> bool:
        """Whether `propose` gives trees, with parent_indices, or chains."""
        return False

    @property
    def tap_layers(self) -> tuple[int, ...]:
        """The target's hidden states that `update` finds in `output.hidden_states` (runner.engine.hidden_states)."""
        return ()

    @property
    def cache_bytes_per_block(self) -> int:
        """Device memory this proposer needs for every KV block of the engine."""
        return 0

    @property
    def state_bytes(self) -> int:
        """Device memory that it needs beside, for states of max_num_seqs requests, or for nodes of their trees."""
        return 0

    @property
    def has_passes(self) -> bool:
        """Whether it runs layers, whose passes may be captured beside the target's."""
        return self.cache_bytes_per_block > 0

    def allocate_cache(self, num_blocks: int) -> None:  # noqa: B027 - optional
        """Allocate what `cache_bytes_per_block` and `state_bytes` announced."""


def check_tap_layers(proposer: Proposer, num_layers: int) -> None:
    """Refuse hidden states that a target of so many layers does not have."""
    taps = proposer.tap_layers
    if not all(NORMED <= tap <= num_layers for tap in taps):
        rule = f"hold {NORMED} (what the target's head reads) or 0 to {num_layers}, its layers"
        raise UserError(f"{proposer.name}.tap_layers must {rule}, got {list(taps)}; mend the proposer")


def check_drafts(proposer: Proposer, schedule: Schedule, drafts: DraftTokens) -> None:
    """Refuse guesses that would corrupt the step.

    Raises:
        UserError: what the proposer must return, and what it returned.
    """
    refused = f"{proposer.name}.propose must"
    if not isinstance(drafts, DraftTokens):  # a user's class may return anything
        raise UserError(f"{refused} return DraftTokens, got {drafts!r}; mend the proposer")
    context, totals, ids, probs = proposer.context, drafts.cu_num_draft_tokens, drafts.token_ids, drafts.probs
    if not (isinstance(totals, list) and all(isinstance(count, int) for count in totals)):
        rule = "give cu_num_draft_tokens as a list of ints, on the host"
        raise UserError(f"{refused} {rule}, got {totals!r}; mend the proposer")
    for name, value, kind in (("token_ids", ids, torch.Tensor), ("probs", probs, torch.Tensor | None)):
        if not isinstance(value, kind):
            raise UserError(f"{refused} give {name} as a tensor, got {type(value).__name__}; mend the proposer")
    counts = drafts.num_draft_tokens
    limits = [item.max_draft_tokens for item in schedule.decoding]
    total = sum(counts)
    probs_shape = None if probs is None else list(probs.shape)
    is_known = context.device.type == "cpu" and total > 0  # elsewhere a look at the ids would stall the step
    rules: tuple[tuple[bool, str, object], ...] = (
        (totals[:1] == [0], "start cu_num_draft_tokens with 0", totals),
        (len(counts) == len(limits), f"give drafts for the {len(limits)} decoding requests", len(counts)),
        (
            all(0 <= count <= limit for count, limit in zip(counts, limits, strict=False)),
            f"draft at most max_draft_tokens ({limits})",
            counts,
        ),
        (ids.dtype == torch.int64, "give token_ids of dtype int64", ids.dtype),
        (ids.shape == (total,), f"give token_ids of shape [{total}]", list(ids.shape)),
        (ids.device.type == context.device.type, f"give token_ids on {context.device}", ids.device),
        (
            probs_shape in (None, [total, context.vocab_size]),
            f"give probs [{total}, {context.vocab_size}], or None",
            probs_shape,
        ),
    )
    for holds, rule, found in rules:
        if not holds:
            raise UserError(f"{refused} {rule}, got {found}; mend the proposer")
    if drafts.parent_indices is not None:
        _check_parents(drafts, refused)
    if context.has_states and drafts.has_branches:
        rule = "draft chains, for the states of the target's layers follow one path of tokens"
        raise UserError(f"{refused} {rule}, got {drafts.parent_indices}; mend the proposer")
    if not is_known:
        return
    if int(ids.min()) < (-1 if drafts.is_padded else 0) or int(ids.max()) >= context.vocab_size:
        rule = f"draft tokens in [0, {context.vocab_size - 1}], the vocabulary"
        raise UserError(f"{refused} {rule}, got {ids.tolist()}; mend the proposer")
    if drafts.is_padded and _has_gap(ids.tolist(), drafts.cu_num_draft_tokens):
        rule = "fill the last slots of a request with -1, and no slot before a draft"
        raise UserError(f"{refused} {rule}, got {ids.tolist()}; mend the proposer")
    if drafts.parent_indices is not None:
        _check_siblings(drafts, refused)


def _check_parents(drafts: DraftTokens, refused: str) -> None:
    """Every draft hangs on one before it, and every slot of a tree holds a draft."""
    parents = drafts.parent_indices
    if drafts.is_padded:
        raise UserError(f"{refused} fill every slot of a draft tree, is_padded is for chains; mend the proposer")
    if not isinstance(parents, list) or len(parents) != drafts.cu_num_draft_tokens[-1]:
        rule = f"give parent_indices as a list of {drafts.cu_num_draft_tokens[-1]} ints, on the host"
        raise UserError(f"{refused} {rule}, got {parents!r}; mend the proposer")
    for start, end in pairwise(drafts.cu_num_draft_tokens):
        own = parents[start:end]
        if not all(-1 <= parent < place for place, parent in enumerate(own)):
            rule = "name parents by their place among the request's own drafts, before their children, or -1"
            raise UserError(f"{refused} {rule}, got {own}; mend the proposer")


def _check_siblings(drafts: DraftTokens, refused: str) -> None:
    """Siblings are distinct, and their probs, if they have any, those of draws without replacement."""
    ids, probs = drafts.token_ids.tolist(), drafts.probs
    for start, shape in zip(drafts.cu_num_draft_tokens, drafts.shapes, strict=False):
        for nodes in shape.children:
            siblings = [ids[start + node] for node in nodes]
            if len(set(siblings)) < len(siblings):
                raise UserError(f"{refused} draft distinct siblings, got {siblings}; mend the proposer")
            if probs is None:
                continue
            for rank, node in enumerate(nodes[1:], start=1):
                if probs[start + node, siblings[:rank]].any():
                    rule = (
                        "give each sibling the distribution it was drawn from given the earlier ones, 0 at their "
                        "tokens (candidates that were not drawn one by one have none: probs=None)"
                    )
                    found = f"for {siblings[rank]} a distribution that allows {siblings[:rank]}"
                    raise UserError(f"{refused} {rule}, got {found}; mend the proposer")


def _has_gap(token_ids: list[int], cu_num_draft_tokens: list[int]) -> bool:
    """Whether a request's slots hold a draft behind a -1."""
    slots = (token_ids[start:end] for start, end in pairwise(cu_num_draft_tokens))
    return any(before < 0 <= token for own in slots for before, token in pairwise(own))


def proposer_class(method: str) -> type[Proposer]:
    """The Proposer defined in proposers/<method>.py."""
    module = importlib.import_module(f"proposers.{method}")
    found = [
        value
        for value in vars(module).values()
        if isinstance(value, type) and issubclass(value, Proposer) and value.__module__ == module.__name__
    ]
    assert len(found) == 1, f"proposers/{method}.py must define one Proposer, found {found}"
    return found[0]


def draft_tokens_from_lists(guesses: list[list[int]], device: torch.device) -> DraftTokens:
    """DraftTokens of host-side guesses, one list a decoding request."""
    cu_num_draft_tokens = [0]
    for guess in guesses:
        cu_num_draft_tokens.append(cu_num_draft_tokens[-1] + len(guess))
    flat = [token for guess in guesses for token in guess]
    return DraftTokens(token_ids=to_device(flat, torch.int64, device), cu_num_draft_tokens=cu_num_draft_tokens)
