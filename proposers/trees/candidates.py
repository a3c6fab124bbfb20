"""Several candidates for one place: the siblings of a draft tree, and the distributions they were drawn from.

Drawn without replacement by the Gumbel top-k trick, whose order is that of the draws (Kool et al., arXiv 1903.06059).
"""

from __future__ import annotations

import torch
from torch import Tensor

from kernels.reference.philox import Stream
from kernels.reference.sampling import softmax
from kernels.reference.top_candidates import Candidates
from runner.engine.backend import runs_kernels
from runner.engine.row_sampling import GREEDY_SHARPNESS, sharpened
from runner.engine.sampling import SamplingRows, put_rows, rows_at
from runner.engine.sampling_rows import greedy_mask


def draw_candidates(
    processed: Tensor,
    rows: SamplingRows,
    draft_sample_method: str,
    num_candidates: int,
    *,
    need_probs: bool,
    draft_step: int | Tensor = 0,
) -> tuple[Tensor, Tensor | None]:
    """Candidates [num_rows, num_candidates] int64 of a drafter's processed logits [num_rows, vocab], and their probs.

    They are the highest of `perturbed`, in their order. Probs [num_rows, num_candidates, vocab], where need_probs, of
    each given the candidates before it; a greedy row's are not read. None where all candidates are greedy.
    """
    scores = perturbed(processed, rows, draft_sample_method, draft_step)
    token_ids = top_candidates(scores, num_candidates).token_ids
    if not need_probs or draft_sample_method == "greedy":
        return token_ids, None
    if rows.all_greedy:  # of a level that no other request's tree has come to
        return token_ids, processed.new_zeros(*token_ids.shape, processed.shape[1])
    return token_ids, _draft_probs(processed, token_ids)


def perturbed(processed: Tensor, rows: SamplingRows, draft_sample_method: str, draft_step: int | Tensor = 0) -> Tensor:
    """Processed logits [num_rows, vocab] by whose order candidates come.

    greedy: as they are: the likeliest ones, a set that was not drawn. probabilistic: with noise of the DRAFT stream,
    keyed by draft_step too where the rule asks for it. coupled: with the target's own noise. Greedy rows: as they are.
    """
    if draft_sample_method not in ("greedy", "probabilistic", "coupled"):
        raise ValueError(f"draft_sample_method must be greedy, probabilistic or coupled, got {draft_sample_method!r}")
    if draft_sample_method == "greedy" or rows.all_greedy:
        return processed
    stream, step = (Stream.TARGET, 0) if draft_sample_method == "coupled" else (Stream.DRAFT, draft_step)
    random = rows.random_row_idx
    seeds, positions = rows_at(rows.seeds, random), rows_at(rows.positions, random)
    steps = rows_at(step, random) if isinstance(step, Tensor) else torch.full_like(seeds, step)
    noisy = _with_noise(rows_at(processed, random), seeds, positions, stream, steps)
    return put_rows(processed, random, noisy)


def likeliest_candidates(scores: Tensor, rows: SamplingRows, width: int) -> Candidates:
    """The highest of `perturbed`, with the log-probabilities that trees grow by (RowSampling.candidates)."""
    if rows.all_greedy:
        return top_candidates(scores, width, sharpness=GREEDY_SHARPNESS)
    if (is_greedy := greedy_mask(rows.random_row_idx, rows.seeds)) is not None:
        scores = sharpened(scores, is_greedy)
    return top_candidates(scores, width)


def top_candidates(logits: Tensor, width: int, *, sharpness: int = 1) -> Candidates:
    """The `width` likeliest tokens of each row of logits [num_rows, vocab] float32; width is at most vocab."""
    if not runs_kernels(logits):
        from kernels.cpu.top_candidates import top_candidates as on_cpu

        return on_cpu(logits, width, sharpness=sharpness)
    from kernels.top_candidates import top_candidates as kernel

    return kernel(logits, width, sharpness=sharpness)


def _with_noise(processed: Tensor, seeds: Tensor, positions: Tensor, stream: Stream, draft_steps: Tensor) -> Tensor:
    if not runs_kernels(processed):
        from kernels.cpu.perturb import perturb as on_cpu

        return on_cpu(processed, seeds, positions, draft_steps, stream=stream)
    from kernels.perturb import perturb

    return perturb(processed, seeds, positions, draft_steps, stream=stream)


def _draft_probs(processed: Tensor, token_ids: Tensor) -> Tensor:
    """Of each candidate given the ones before it, [num_rows, num_candidates, vocab]."""
    probs = []
    logits = processed
    for rank in range(token_ids.shape[1]):
        own = token_ids[:, rank : rank + 1]
        # Where a cut-off left fewer tokens than candidates, the others come in a fixed order, each with
        # probability 1.
        is_spent = (logits == float("-inf")).all(dim=-1, keepdim=True)
        one_hot = torch.zeros_like(processed).scatter_(1, own, 1.0)
        probs.append(torch.where(is_spent, one_hot, softmax(logits)))
        logits = logits.scatter(1, own, float("-inf"))
    return torch.stack(probs, dim=1)
