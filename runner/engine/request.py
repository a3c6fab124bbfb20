"""The records that travel between scheduler, proposer and verifier.

Only the scheduler advances a Request. The caller sets its arrival time and, at its end, its text; sampling keeps
tensors with it, which the scheduler drops.
"""

from __future__ import annotations

import enum
import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import NamedTuple

import torch

from runner.engine.draft_trees import TreeShape, tree_shape
from runner.engine.hidden_states import HiddenStates
from runner.engine.logprobs import StepLogprobs, TokenLogprobs
from runner.engine.request_tensors import RequestTensors
from runner.engine.sampling_params import SamplingParams


class RequestStatus(enum.Enum):
    WAITING = "waiting"
    RUNNING = "running"
    FINISHED = "finished"
    FAILED = "failed"


@dataclass(kw_only=True, eq=False)
class Request:
    """One prompt on its way to one completion."""

    request_id: str
    prompt_token_ids: list[int]
    sampling_params: SamplingParams
    seed: int  # 64-bit key of every random draw of this request
    prompt_index: int = 0  # place of the prompt in the workload; n completions share it
    prompt: str | None = None
    bad_words_token_ids: tuple[tuple[int, ...], ...] = ()  # sequences that the output may not hold
    arrival_time: float = 0.0  # s, time.perf_counter

    status: RequestStatus = RequestStatus.WAITING
    output_token_ids: list[int] = field(default_factory=list)
    num_computed_tokens: int = 0  # tokens whose KV is in the target's cache
    block_table: list[int] = field(default_factory=list)  # physical block of each block_size positions
    state_slot: int = 0  # of recurrent layers' states, while it runs; 0: none
    prefix_keys: list[bytes] = field(default_factory=list, repr=False)  # what its prompt's blocks are known by
    num_known_blocks: int = 0  # of block_table, its first: requests whose prompts begin alike may find them
    # Of the prompt, that others had computed when it was first admitted; None: it was not looked for.
    num_cached_tokens: int | None = None
    num_preemptions: int = 0
    finish_reason: str | None = None  # "stop" | "length" | "abort" | "error"
    stop_reason: int | str | None = None  # the stop token or string that ended it; None for eos
    text: str = ""  # decoded output, up to the stop string
    logprobs: list[TokenLogprobs] = field(default_factory=list)  # of the output tokens, where asked for
    prompt_logprobs: list[TokenLogprobs] = field(default_factory=list)  # of the prompt's, from its second token on
    tensors: RequestTensors | None = field(default=None, repr=False)  # while it runs, once its rows were sampled

    @property
    def num_prompt_tokens(self) -> int:
        return len(self.prompt_token_ids)

    @property
    def num_tokens(self) -> int:
        """Committed tokens: prompt and output."""
        return len(self.prompt_token_ids) + len(self.output_token_ids)

    @property
    def is_decoding(self) -> bool:
        """Whether all that is left to compute is the token that was sampled last."""
        return self.num_computed_tokens + 1 == self.num_tokens and bool(self.output_token_ids)

    @property
    def last_token_id(self) -> int:
        """The last committed token."""
        return (self.output_token_ids or self.prompt_token_ids)[-1]

    def tokens_between(self, start: int, end: int) -> list[int]:
        """Committed tokens at positions start..end-1, without copying the whole sequence."""
        num_prompt = len(self.prompt_token_ids)
        if start >= num_prompt:
            return self.output_token_ids[start - num_prompt : end - num_prompt]
        if end <= num_prompt:
            return self.prompt_token_ids[start:end]
        return self.prompt_token_ids[start:] + self.output_token_ids[: end - num_prompt]

    def tensors_on(self, device: torch.device, vocab_size: int, eos_token_ids: tuple[int, ...]) -> RequestTensors:
        """`tensors`, begun where there are none; the arguments are the engine's and never change."""
        if self.tensors is None:
            self.tensors = RequestTensors(
                self.sampling_params,
                self.prompt_token_ids,
                self.bad_words_token_ids,
                vocab_size=vocab_size,
                eos_token_ids=eos_token_ids,
                device=device,
            )
        return self.tensors

    @property
    def reads_prefix(self) -> bool:
        """Whether it may start behind what others have computed of its prompt: nothing is asked of those tokens."""
        return self.sampling_params.prompt_logprobs is None

    @property
    def is_finished(self) -> bool:
        return self.status in (RequestStatus.FINISHED, RequestStatus.FAILED)


@dataclass(frozen=True, kw_only=True)
class DraftTokens:
    """Guesses of one step, flat over the requests of the batch (vLLM's layout).

    Request b owns entries cu_num_draft_tokens[b] : cu_num_draft_tokens[b + 1]. A proposer on the device, which cannot
    tell the host how many tokens it found, gives every request the slots it may have and fills the last ones with -1.

    A tree's parents are on the host, for the layout of the launch follows from them. They come before their children,
    siblings are distinct tokens, and no slot is without a draft. Siblings with probs are judged one after
    another: node j's distribution is the one it was drawn from given its earlier siblings, q renormalised without them,
    and neither a sibling nor the shape may have been chosen by what was drawn (arXiv 2402.14160). Candidates that were
    not drawn, such as the k most probable ones, have parents and no probs, also where they happen to form a chain: the
    target's own draw is looked for among them.
    """

    token_ids: torch.Tensor  # [num_draft_tokens] int64
    cu_num_draft_tokens: list[int]  # [B + 1], starts with 0
    probs: torch.Tensor | None = None  # [num_draft_tokens, vocab] float32: q of each token; None = one-hot
    # [num_draft_tokens]: place of each token's parent among its request's drafts, -1 = the pending token; None = chains
    parent_indices: list[int] | None = None
    sources: tuple[str, ...] = ()  # the proposer of each token; empty = the one proposer of the run
    is_padded: bool = False  # trailing slots of a request may hold -1, no draft

    @classmethod
    def empty(cls, num_requests: int, device: torch.device | str = "cpu") -> DraftTokens:
        return cls(
            token_ids=torch.empty(0, dtype=torch.int64, device=device), cu_num_draft_tokens=[0] * (num_requests + 1)
        )

    @property
    def num_draft_tokens(self) -> list[int]:
        """Drafted tokens of each request, [B], slots without a draft included."""
        return [end - start for start, end in itertools.pairwise(self.cu_num_draft_tokens)]

    @property
    def draft_sources(self) -> list[str | None]:
        """Whose first token each request's drafts begin with, [B]; None: no drafts, or there is one proposer only."""
        sources = self.sources or [None] * self.cu_num_draft_tokens[-1]
        return [sources[start] if end > start else None for start, end in itertools.pairwise(self.cu_num_draft_tokens)]

    @property
    def first_logits_rows(self) -> list[int]:
        """Of each request's pending token, which its drafts' rows follow, [B]."""
        return [start + b for b, start in enumerate(self.cu_num_draft_tokens[:-1])]

    @property
    def parents(self) -> list[Sequence[int] | None]:
        """Parents of each request's drafts, [B]; None = a chain."""
        if self.parent_indices is None:
            return [None] * (len(self.cu_num_draft_tokens) - 1)
        return [self.parent_indices[start:end] for start, end in itertools.pairwise(self.cu_num_draft_tokens)]

    @cached_property
    def shapes(self) -> list[TreeShape]:
        """The tree of each request's drafts, [B]; a chain is a tree too."""
        return [
            tree_shape(range(-1, count - 1) if own is None else own)
            for count, own in zip(self.num_draft_tokens, self.parents, strict=True)
        ]

    @property
    def depths(self) -> list[int]:
        """The most tokens of each request that can be accepted, [B]: for a chain, all of them."""
        return self.num_draft_tokens if self.parent_indices is None else [shape.depth for shape in self.shapes]

    @property
    def are_candidates(self) -> bool:
        """Trees whose nodes were not drawn."""
        return self.parent_indices is not None and self.probs is None

    @property
    def has_branches(self) -> bool:
        return self.parent_indices is not None and not all(shape.is_chain for shape in self.shapes)


class JudgedTokens(NamedTuple):
    """What the target said behind the tokens of a step: pending ones, and drafts, also those that were rejected."""

    token_ids: torch.Tensor  # [num_rows] int64; -1: a draft's place that held none
    logits: torch.Tensor  # [num_rows, vocab] float32, as the target gave them
    of_requests: list[int]  # [num_rows]: place among the step's requests that yield a token


@dataclass(frozen=True, kw_only=True)
class VerifyOutput:
    """What verification decided, one row a request that yields a token."""

    token_ids: torch.Tensor  # [B, deepest draft + 1] int64: accepted, then recovered or bonus token, then -1
    num_accepted_tokens: torch.Tensor  # [B] int64: accepted draft tokens, before stop conditions
    logprobs: StepLogprobs | None = None  # None when no request of the step asked for any
    num_draft_tokens: torch.Tensor | None = None  # [B] int64: verified drafts; None = as DraftTokens says, none is -1
    # [B, deepest draft] int64: place of each accepted token among its request's drafts, then -1; None = chains
    path: torch.Tensor | None = None
    hidden_states: HiddenStates | None = None  # of every scheduled request's tokens; None when no proposer asked
    judged: JudgedTokens | None = None  # None when no proposer reads logits

    def read(self, drafts: DraftTokens) -> StepOutcome:
        """What the step decided of these drafts; one copy to the host, and another where logprobs were asked for."""
        columns = [self.num_accepted_tokens, *([] if self.num_draft_tokens is None else [self.num_draft_tokens])]
        rows = torch.cat([self.token_ids, torch.stack(columns, dim=1)], dim=1).tolist()
        width, without = self.token_ids.shape[1], [0] * (len(rows) - len(drafts.num_draft_tokens))
        num_drafts, depths = [*drafts.num_draft_tokens, *without], [*drafts.depths, *without]
        if self.num_draft_tokens is not None:  # of the slots, those that held a draft
            num_drafts = [min(count, row[width + 1]) for count, row in zip(num_drafts, rows, strict=True)]
            depths = num_drafts
        return StepOutcome(
            token_ids=rows,
            num_accepted_tokens=[row[width] for row in rows],
            num_draft_tokens=num_drafts,
            draft_depths=depths,
            draft_sources=[*drafts.draft_sources, *[None] * len(without)],
            logprobs={} if self.logprobs is None else self.logprobs.read(),
        )


@dataclass(frozen=True, kw_only=True)
class StepOutcome:
    """What a step decided, on the host: a row for every scheduled request that yields a token, in order."""

    token_ids: Sequence[list[int]]  # [B, ...]: accepted drafts, the token behind them, and what is nobody's
    num_accepted_tokens: Sequence[int]  # [B]: before stop conditions
    num_draft_tokens: Sequence[int]  # [B]
    draft_depths: Sequence[int]  # [B]: the most drafts that can be accepted; for a chain, all of them
    draft_sources: Sequence[str | None]  # [B]: whose first drafts they are; None: nobody's, or there is one proposer
    # By request, of those that asked: of the prompt's tokens, and of the row's
    logprobs: Mapping[str, tuple[Sequence[TokenLogprobs], Sequence[TokenLogprobs]]] = field(default_factory=dict)
