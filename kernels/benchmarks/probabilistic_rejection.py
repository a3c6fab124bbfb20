"""Drafts judged by their probabilities: 64 requests of 4 drafts over Llama-3-8B's vocabulary.

The rows' cuts and masses are given (truncation is a benchmark of its own).
"""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor

from kernels import probabilistic_rejection as kernel
from kernels.benchmarks.case import VOCAB_SIZE, Case, Setting, Work, check_draws, noise_uncertainty
from kernels.benchmarks.rejection import check_verified, request_seeds
from kernels.reference import rejection as reference
from kernels.reference.philox import Stream, gumbel, uniform
from kernels.reference.rejection import Verified
from kernels.truncation import truncate_rows

NUM_DRAFTS = 4
P_ROUNDING = 2.0**-19  # relative error of a float32 exp(logit - maximum) / mass, with logits within 32 of the maximum


def cases(setting: Setting) -> list[Case]:
    num_requests, vocab_size = (4, 300) if setting.is_small else (64, VOCAB_SIZE)
    return [
        Case(
            op="probabilistic_rejection",
            label=f"{num_requests} requests x {NUM_DRAFTS}",
            dtype="float32",
            prepare=partial(_prepare, setting, num_requests, vocab_size),
        )
    ]


def _prepare(setting: Setting, num_requests: int, vocab_size: int) -> Work:
    logits = setting.normal(num_requests, NUM_DRAFTS + 1, vocab_size, seed=0, dtype=torch.float32).mul_(3.0)
    change = setting.normal(num_requests, NUM_DRAFTS, vocab_size, seed=1, dtype=torch.float32)
    probs = (logits[:, :-1] + change).softmax(dim=-1)
    generator = torch.Generator(setting.device).manual_seed(2)
    drafts = probs.flatten(0, 1).multinomial(1, generator=generator).view(num_requests, NUM_DRAFTS)
    rows = logits.flatten(0, 1)
    seeds = request_seeds(setting, num_requests, NUM_DRAFTS + 1)
    positions = torch.arange(len(rows), device=setting.device)
    cu = torch.arange(num_requests + 1, device=setting.device, dtype=torch.int32) * NUM_DRAFTS
    truncated = truncate_rows(rows, positions)

    def verify(rows: Tensor, draft_probs: Tensor) -> Verified:
        return kernel.verify_probabilistic(
            rows, truncated, drafts.flatten(), draft_probs, cu, seeds, positions, max_num_draft_tokens=NUM_DRAFTS
        )

    p_draft = logits[:, :-1].double().softmax(dim=-1).gather(2, drafts.unsqueeze(2)).squeeze(2)
    q_draft = probs.gather(2, drafts.unsqueeze(2)).squeeze(2)
    uniforms = uniform(seeds, positions, Stream.ACCEPT).view(num_requests, -1)[:, :-1]
    accepted = reference.accept_probabilistic(p_draft, q_draft, uniforms)
    counts = reference.count_accepted(accepted)
    request_idx = torch.arange(num_requests, device=setting.device)
    is_rejected = counts < NUM_DRAFTS

    def check() -> list[str]:
        verified = verify(rows, probs.flatten(0, 1))
        last = verified.token_ids.gather(1, counts.unsqueeze(1)).squeeze(1)
        check_verified(verified, drafts, accepted, last)
        check_last(last)
        return ["tokens", "draws"]

    def check_last(last: Tensor) -> None:
        """Where a draft was rejected the draw is from max(p - q, 0), elsewhere from p, by another stream's noise."""
        places = request_idx * (NUM_DRAFTS + 1) + counts
        p = logits[request_idx, counts].double().softmax(dim=1)
        q = probs[request_idx, counts.clamp(max=NUM_DRAFTS - 1)].double()
        unnormalised = torch.where(is_rejected.unsqueeze(1), reference.residual(p, q), p)
        streams = torch.where(is_rejected, int(Stream.RESIDUAL), int(Stream.TARGET))
        noise = gumbel(seeds[places], positions[places], streams, vocab_size=vocab_size)
        scores = unnormalised.log() + noise
        # What rounds p is small beside p, but not always beside p - q.
        uncertainty = noise_uncertainty(noise, scores) + P_ROUNDING * (p / unnormalised).nan_to_num(nan=0.0, posinf=0.0)
        check_draws(last, scores, uncertainty)

    num_rows_read = num_requests + int(is_rejected.sum())  # one of logits each, and one of a rejected draft's probs
    num_bytes = num_rows_read * vocab_size * 4
    return Work(
        check=check,
        calls=[partial(verify, *own) for own in setting.copies(num_bytes, rows, probs.flatten(0, 1))],
        num_bytes=num_bytes,
        comes_from=setting.comes_from(num_bytes),
    )
