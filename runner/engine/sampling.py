"""What the sampler and the drafters do with logits rows.

process_logits applies, to vLLM's effect: logit bias; the masks (allowed tokens, bad words, min_tokens, grammar);
penalties, temperature, min_p, top_k, top_p; a greedy row skips what cannot move its argmax. sample_tokens draws with
position-keyed noise (kernels/reference/philox.py).
Nothing here reads a tensor back to the host, and no row's bits depend on the other rows.
"""

from __future__ import annotations

import torch
from torch import Tensor

from kernels.reference import sampling as ops
from kernels.reference.philox import Stream
from runner.engine.backend import runs_kernels
from runner.engine.sampling_rows import SamplingRows, greedy_mask

__all__ = [
    "SamplingRows",
    "draft_tokens",
    "draw_tokens",
    "mask_and_penalise",
    "process_logits",
    "put_rows",
    "rows_at",
    "sample_at",
    "sample_last",
    "sample_tokens",
]


def process_logits(logits: Tensor, rows: SamplingRows) -> Tensor:
    """[num_rows, vocab] of any float dtype -> float32 logits to sample from: by their softmax, or argmax if greedy.

    Never changes its input; returns that very tensor when it is float32 and no row asks for anything.
    """
    logits = mask_and_penalise(logits, rows)
    if rows.has_cuts:
        return rows.of_every_row().processed(logits)
    return logits if rows.temperatures is None else logits / rows.temperatures.unsqueeze(1)


def mask_and_penalise(logits: Tensor, rows: SamplingRows) -> Tensor:
    """What precedes temperature and cut-offs, as float32 [num_rows, vocab]; never changes its input."""
    assert logits.shape == (rows.num_rows, rows.vocab_size), (logits.shape, rows.num_rows, rows.vocab_size)
    logits = logits.to(torch.float32)
    if (bias := rows.logit_bias) is not None:
        assert bias.values is not None
        logits = ops.apply_logit_bias(logits, bias.row_idx, bias.token_ids, bias.values)
    unmasked = logits
    if (allowed := rows.allowed) is not None:
        kept = ops.keep_tokens(rows_at(logits, allowed.row_idx), allowed.values)
        logits = put_rows(logits, allowed.row_idx, kept)
    if (bad := rows.bad_words) is not None:
        logits = ops.mask_tokens_where(logits, bad.row_idx, bad.token_ids, bad.applies)
    if (forbidden := rows.forbidden) is not None:
        logits = ops.mask_tokens(logits, forbidden.row_idx, forbidden.token_ids)
    if (grammar := rows.bitmask) is not None:
        # Where the masks above leave nothing of what the grammar allows, the grammar alone holds.
        kept = ops.apply_token_bitmask(
            rows_at(logits, grammar.row_idx), grammar.words, fallback=rows_at(unmasked, grammar.row_idx)
        )
        logits = put_rows(logits, grammar.row_idx, kept)
    if (pen := rows.penalties) is not None:
        penalised = ops.apply_penalties(
            rows_at(logits, pen.row_idx), pen.seen, pen.output_counts, pen.repetition, pen.frequency, pen.presence
        )
        logits = put_rows(logits, pen.row_idx, penalised)
    return logits


def sample_tokens(
    processed: Tensor, rows: SamplingRows, stream: int = Stream.TARGET, draft_step: int | Tensor = 0
) -> Tensor:
    """One token for each row of processed logits, [num_rows] int64; greedy rows: argmax. Ties go to the lowest id."""
    return sample_at(processed, rows.seeds, rows.positions, rows.random_row_idx, stream, draft_step)


def draw_tokens(logits: Tensor, rows: SamplingRows) -> Tensor:
    """One token for each row of unprocessed logits, [num_rows] int64: sample_tokens of process_logits."""
    if not runs_kernels(logits.device):
        return sample_tokens(process_logits(logits, rows), rows)
    return rows.of_every_row().draw(mask_and_penalise(logits, rows))


def sample_at(
    processed: Tensor,  # [num_rows, vocab] float32
    seeds: Tensor,  # [num_rows] int64
    positions: Tensor,  # [num_rows] int64
    random_row_idx: Tensor | None,  # [num_random] int64; None = all rows
    stream: int,
    draft_step: int | Tensor = 0,
) -> Tensor:
    """`sample_tokens` with the keys given one by one, for rows picked out on the device."""
    if random_row_idx is not None and len(random_row_idx) == 0 and not runs_kernels(processed):
        return ops.greedy_argmax(processed)
    return _sample_by_kernel(processed, seeds, positions, random_row_idx, stream, draft_step)


def sample_last(
    processed: Tensor,  # [num_requests, vocab] float32: the target's rows, or what rejections left of them
    is_rejected: Tensor,  # [num_requests] bool: which
    seeds: Tensor,  # [num_requests] int64
    positions: Tensor,  # [num_requests] int64
    random_row_idx: Tensor | None,  # [num_random] int64; None = all rows
) -> Tensor:
    """The recovered or bonus token of each request, [num_requests] int64.

    A recovered token must not reuse noise that the drafts or a coupled target draw have used at its position.
    """
    recovered, of_target = (
        sample_at(processed, seeds, positions, random_row_idx, stream) for stream in (Stream.RESIDUAL, Stream.TARGET)
    )
    return torch.where(is_rejected, recovered, of_target)


def _sample_by_kernel(
    processed: Tensor,
    seeds: Tensor,
    positions: Tensor,
    random_row_idx: Tensor | None,
    stream: int,
    draft_step: int | Tensor,
) -> Tensor:
    draft_steps = draft_step if isinstance(draft_step, Tensor) else None
    assert draft_steps is not None or draft_step == 0, "other keys come as a tensor"
    is_greedy = greedy_mask(random_row_idx, seeds)
    if runs_kernels(processed):
        from kernels.sampling import sample

        return sample(processed, seeds, positions, stream=stream, draft_steps=draft_steps, is_greedy=is_greedy)
    from kernels.cpu.sampling import sample as on_cpu

    return on_cpu(processed, seeds, positions, stream=stream, draft_steps=draft_steps, is_greedy=is_greedy)


def draft_tokens(
    processed: Tensor,
    rows: SamplingRows,
    draft_sample_method: str,
    *,
    need_probs: bool,
    draft_step: int | Tensor = 0,
) -> tuple[Tensor, Tensor | None]:
    """Draft token ids [num_rows] of a model drafter's processed logits, and q [num_rows, vocab], their distribution.

    greedy: argmax, q None (one-hot). probabilistic: a draw with the DRAFT stream, keyed by draft_step [num_rows] too
    where the rule asks for it. coupled: a draw with the target's own noise. q is None when all rows are greedy, and
    without need_probs (the strict rule does not read it).
    """
    if draft_sample_method not in ("greedy", "probabilistic", "coupled"):
        raise ValueError(f"draft_sample_method must be greedy, probabilistic or coupled, got {draft_sample_method!r}")
    if draft_sample_method == "greedy" or rows.all_greedy:
        return ops.greedy_argmax(processed), None
    if draft_sample_method == "probabilistic":
        token_ids = sample_tokens(processed, rows, Stream.DRAFT, draft_step)
    else:
        token_ids = sample_tokens(processed, rows)
    return token_ids, ops.softmax(processed) if need_probs else None


def rows_at(rows: Tensor, row_idx: Tensor | None) -> Tensor:
    """row_idx: [num_taken] int64; None = all."""
    return rows if row_idx is None else rows.index_select(0, row_idx)


def put_rows(rows: Tensor, row_idx: Tensor | None, new_rows: Tensor) -> Tensor:
    return new_rows if row_idx is None else rows.index_copy(0, row_idx, new_rows)
