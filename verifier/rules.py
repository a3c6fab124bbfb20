"""The verification rules, one class each: how many draft tokens of a request stay, and which token follows them.

strict keeps plain decoding's very tokens, probabilistic and block its distribution. typical and synthetic are lossy.
Under every rule a greedy request keeps a draft token iff it is the target's argmax (synthetic alone looks at no token).
All noise is keyed by (seed, position), so a request's result does not depend on its batch.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import ClassVar

import torch
from torch import Tensor

from kernels.reference import rejection as ops
from kernels.reference.philox import Stream
from kernels.reference.sampling import greedy_argmax, softmax
from runner.engine.sampling import SamplingRows, put_rows, rows_at, sample_at, sample_last, sample_tokens
from runner.engine.step_operations import uniforms
from runner.engine.upload import to_device
from verifier.draft_batch import DraftBatch
from verifier.traversal import traverse
from verifier.tree import follow_rates, follow_tokens, longest_accepted, reject_recursively
from verifier.tree_batch import TreeBatch


class Rule(ABC):
    """Judges the drafts of a step."""

    reads_draft_probs: ClassVar[bool] = False
    # A rule whose decision looks at drafts and noise beyond the place where it cuts must not meet them again in the
    # next step: its noise, and that of the drafts, is keyed by the step too. What is drawn below two nodes of a tree is
    # independent.
    keys_by_draft_step: ClassVar[bool] = False
    # Whether it looks for the target's own token among candidates of trees that were not drawn. So does Strict, and it
    # keeps plain decoding's distribution, and even its tokens.
    follows_target: ClassVar[bool] = False

    @abstractmethod
    def verify(self, processed: Tensor, batch: DraftBatch, rows: SamplingRows) -> tuple[Tensor, Tensor]:
        """(accepted draft tokens, the token after them), both [num_requests] int64.

        The definition; where verifier/kernel_rules.py has a kernel of the rule, that judges chains.

        processed: [num_rows, vocab] float32, what process_logits made of the target's logits.
        """

    @abstractmethod
    def verify_tree(self, processed: Tensor, tree: TreeBatch, rows: SamplingRows) -> tuple[Tensor, Tensor]:
        """(row of the last accepted draft or of the pending token, the token after it), both [num_requests] int64.

        A request whose drafts are a chain is judged as by `verify`.
        """

    def accept_noise(self, batch: DraftBatch, rows: SamplingRows) -> Tensor:
        """One uniform variate a draft, [num_drafts] float64."""
        seeds, positions = rows_at(rows.seeds, batch.row_idx), rows_at(rows.positions, batch.row_idx)
        steps = None
        if self.keys_by_draft_step:
            steps = rows_at(rows_at(rows.positions, batch.first_row_idx), batch.request_idx)
        return uniforms(seeds, positions, steps, stream=Stream.ACCEPT).squeeze(1)


class Strict(Rule):
    """A draft token stays iff it is the token the target draws there (arXiv 2408.07978)."""

    follows_target = True

    def verify(self, processed: Tensor, batch: DraftBatch, rows: SamplingRows) -> tuple[Tensor, Tensor]:
        target_token_ids = sample_tokens(processed, rows)
        accepted = ops.accept_strict(target_token_ids[batch.row_idx], batch.token_ids)
        num_accepted = ops.count_accepted(batch.padded(accepted))
        return num_accepted, target_token_ids[batch.first_row_idx + num_accepted]

    def verify_tree(self, processed: Tensor, tree: TreeBatch, rows: SamplingRows) -> tuple[Tensor, Tensor]:
        target_token_ids = sample_tokens(processed, rows)
        last = follow_tokens(tree, target_token_ids)
        return last, target_token_ids[last]


class Probabilistic(Rule):
    """A draft token stays iff u * q(x) < p(x), else max(p - q, 0) replaces it (arXiv 2211.17192, 2302.01318).

    In a tree siblings are judged one after another.
    """

    reads_draft_probs = True
    follows_target = True

    def verify(self, processed: Tensor, batch: DraftBatch, rows: SamplingRows) -> tuple[Tensor, Tensor]:
        p_draft = batch.of_drafts(batch.target_probs(processed))
        q_draft = None if batch.probs is None else batch.of_drafts(rows_at(batch.probs, batch.random_draft_idx))
        uniforms = rows_at(self.accept_noise(batch, rows), batch.random_draft_idx)
        accepted = batch.padded_random(ops.accept_probabilistic(p_draft, q_draft, uniforms))
        num_accepted = _with_greedy(ops.count_accepted(accepted), processed, batch)
        return num_accepted, _draw_recovered(processed, batch, rows, num_accepted)

    def verify_tree(self, processed: Tensor, tree: TreeBatch, rows: SamplingRows) -> tuple[Tensor, Tensor]:
        return _judge_draws(reject_recursively, processed, tree, rows)


class Block(Rule):
    """The longest prefix that passes stays, gaps included; never shorter on average than Probabilistic's.

    Block verification (arXiv 2403.10444, algorithm 2), in a tree traversal verification (arXiv 2505.12398). It looks
    at drafts beyond the cut: coupled drafts, drawn with the noise of target tokens to come, would bias those.
    """

    reads_draft_probs = True
    keys_by_draft_step = True
    follows_target = True

    def verify(self, processed: Tensor, batch: DraftBatch, rows: SamplingRows) -> tuple[Tensor, Tensor]:
        target_probs = batch.target_probs(processed)
        p_draft = batch.of_drafts(target_probs)
        draft_probs = None if batch.probs is None else rows_at(batch.probs, batch.random_draft_idx)
        q_draft = None if draft_probs is None else batch.padded_random(batch.of_drafts(draft_probs))
        prefix = ops.prefix_probabilities(batch.padded_random(p_draft), q_draft)  # [num_requests, longest + 1]
        before = rows_at(prefix[batch.request_idx, batch.draft_idx], batch.random_draft_idx)
        if draft_probs is None:
            masses = ops.residual_mass_one_hot(p_draft, before)
        else:
            masses = ops.residual_mass(target_probs, draft_probs, before)
        uniforms = batch.padded(self.accept_noise(batch, rows))
        accepted = ops.accept_block(prefix, batch.padded_random(masses), batch.num_draft_tokens(), uniforms)
        num_accepted = _with_greedy(ops.last_accepted(accepted), processed, batch)
        scale = prefix.gather(1, num_accepted.unsqueeze(1)).squeeze(1)
        return num_accepted, _draw_recovered(processed, batch, rows, num_accepted, scale)

    def verify_tree(self, processed: Tensor, tree: TreeBatch, rows: SamplingRows) -> tuple[Tensor, Tensor]:
        return _judge_draws(traverse, processed, tree, rows)


class Typical(Rule):
    """A draft token stays iff the target finds it probable enough for its own uncertainty (Medusa, arXiv 2401.10774).

    Lossy: the text is neither plain decoding's nor distributed like it. The token after the draft is the target's draw.
    """

    def __init__(self, *, posterior_threshold: float, posterior_alpha: float) -> None:
        for name, value in (("posterior_threshold", posterior_threshold), ("posterior_alpha", posterior_alpha)):
            if not 0.0 < value <= 1.0:
                raise ValueError(f"{name} must be in (0, 1], got {value}")
        self.posterior_threshold, self.posterior_alpha = posterior_threshold, posterior_alpha

    def verify(self, processed: Tensor, batch: DraftBatch, rows: SamplingRows) -> tuple[Tensor, Tensor]:
        target_probs = batch.target_probs(processed)
        accepted = ops.accept_typical(
            batch.of_drafts(target_probs),
            ops.entropy(target_probs),
            posterior_threshold=self.posterior_threshold,
            posterior_alpha=self.posterior_alpha,
        )
        num_accepted = _with_greedy(ops.count_accepted(batch.padded_random(accepted)), processed, batch)
        return num_accepted, _draw_target(processed, rows, batch.first_row_idx + num_accepted, batch.random_request_idx)

    def verify_tree(self, processed: Tensor, tree: TreeBatch, rows: SamplingRows) -> tuple[Tensor, Tensor]:
        target_probs = softmax(processed.index_select(0, tree.parent_row_idx))
        accepted = ops.accept_typical(
            target_probs.gather(1, tree.token_ids.unsqueeze(1)).squeeze(1),
            ops.entropy(target_probs),
            posterior_threshold=self.posterior_threshold,
            posterior_alpha=self.posterior_alpha,
        )
        last = longest_accepted(tree, accepted)
        random = tree.random_request_idx
        if random is not None:
            last = follow_tokens(tree, greedy_argmax(processed)).index_copy_(0, random, last[random])
        return last, _draw_target(processed, rows, last, random)


class Synthetic(Rule):
    """Draft tokens stay at set rates, whatever they are: a benchmark's tool."""

    def __init__(self, *, conditional_rates: Sequence[float]) -> None:
        """conditional_rates: for each place in the draft, the rate given that all before it were accepted."""
        self.conditional_rates = list(conditional_rates)
        if not all(0.0 <= rate <= 1.0 for rate in self.conditional_rates):
            raise ValueError(f"synthetic_conditional_rates must be in [0, 1], got {self.conditional_rates}")

    def verify(self, processed: Tensor, batch: DraftBatch, rows: SamplingRows) -> tuple[Tensor, Tensor]:
        self.check_depth(batch.longest)
        per_draft = [rate for count in batch.num_slots for rate in self.conditional_rates[:count]]
        rates = to_device(per_draft, torch.float64, processed.device)
        accepted = ops.accept_synthetic(rates, self.accept_noise(batch, rows)) & (batch.token_ids >= 0)
        num_accepted = ops.count_accepted(batch.padded(accepted))
        return num_accepted, _draw_target(processed, rows, batch.first_row_idx + num_accepted, batch.random_request_idx)

    def verify_tree(self, processed: Tensor, tree: TreeBatch, rows: SamplingRows) -> tuple[Tensor, Tensor]:
        """At the rate of each depth along the first path."""
        self.check_depth(len(tree.widths))
        last = follow_rates(tree, rows, self.conditional_rates)
        return last, _draw_target(processed, rows, last, tree.random_request_idx)

    def check_depth(self, deepest: int) -> None:
        """Raises ValueError when drafts may be longer than there are rates."""
        if deepest > len(self.conditional_rates):
            raise ValueError(
                f"synthetic_conditional_rates must have one rate per draft token ({deepest}), "
                f"got {len(self.conditional_rates)}"
            )


def _judge_draws(
    judge: Callable[[Tensor, TreeBatch, SamplingRows], tuple[Tensor, Tensor]],
    processed: Tensor,
    tree: TreeBatch,
    rows: SamplingRows,
) -> tuple[Tensor, Tensor]:
    """`verify_tree` with a judge of drawn drafts; greedy requests follow the target's own tokens."""
    random = tree.random_request_idx
    if random is None:
        return judge(processed, tree, rows)
    target_token_ids = sample_tokens(processed, rows)
    last = follow_tokens(tree, target_token_ids)
    last_judged, token_ids = judge(processed, tree, rows)
    following = target_token_ids[last].index_copy_(0, random, token_ids)
    return last.index_copy_(0, random, last_judged), following


def _with_greedy(num_accepted: Tensor, processed: Tensor, batch: DraftBatch) -> Tensor:
    """num_accepted with greedy requests' drafts judged by the target's argmax."""
    random = batch.random_request_idx
    if random is None:
        return num_accepted
    accepted = ops.accept_strict(greedy_argmax(processed)[batch.row_idx], batch.token_ids)
    return ops.count_accepted(batch.padded(accepted)).index_copy_(0, random, num_accepted[random])


def _draw_target(processed: Tensor, rows: SamplingRows, last: Tensor, random: Tensor | None) -> Tensor:
    """The target's own token behind row `last` of each request, with the noise that plain decoding has there.

    random: requests that are not greedy; None = all.
    """
    keys = rows_at(rows.seeds, last), rows_at(rows.positions, last)
    return sample_at(rows_at(processed, last), *keys, random, Stream.TARGET)


def _draw_recovered(
    processed: Tensor, batch: DraftBatch, rows: SamplingRows, num_accepted: Tensor, scale: Tensor | None = None
) -> Tensor:
    """The token after the accepted ones: from max(scale * p - q, 0) after a rejection, else the target's own.

    scale: [num_requests], None = 1. Greedy requests take the target's argmax.
    """
    last = batch.first_row_idx + num_accepted
    logits = processed.index_select(0, last)  # [num_requests, vocab]
    is_rejected = num_accepted < batch.num_draft_tokens()
    random = batch.random_request_idx
    # A request without a rejection has no draft at this place; any index will do, as its row is not replaced.
    rejected_idx = (batch.first_draft_idx + num_accepted).clamp_(max=batch.token_ids.shape[0] - 1)
    rejected_idx, target_logits = rows_at(rejected_idx, random), rows_at(logits, random)
    p = softmax(target_logits)
    if batch.probs is None:
        residual = ops.residual_one_hot(p, rows_at(batch.token_ids, rejected_idx))
    else:
        scale = None if scale is None else rows_at(scale, random)
        residual = ops.residual(p, batch.probs.index_select(0, rejected_idx), scale)
    recovered = torch.where(rows_at(is_rejected, random).unsqueeze(1), residual.log(), target_logits)
    logits = put_rows(logits, random, recovered)
    return sample_last(logits, is_rejected, rows_at(rows.seeds, last), rows_at(rows.positions, last), random)
