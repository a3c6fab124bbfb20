"""Drafts against sampled tokens, by the strict and the synthetic rule: 64 requests of 4 drafts."""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor

from kernels import rejection as kernel
from kernels.benchmarks.case import LARGEST_SEED, Case, Setting, Work, check_equal
from kernels.reference import rejection as reference
from kernels.reference.philox import Stream, uniform

RATES = (0.8, 0.7, 0.6, 0.5)


def cases(setting: Setting) -> list[Case]:
    num_requests = 5 if setting.is_small else 64
    return [
        Case(
            op="rejection",
            label=f"{rule}, {num_requests} requests x {len(RATES)}",
            dtype="int64",
            prepare=partial(_prepare, setting, rule, num_requests),
        )
        for rule in ("strict", "synthetic")
    ]


def request_seeds(setting: Setting, num_requests: int, rows_of_a_request: int) -> Tensor:
    """[num_rows] int64: a request's rows share its seed."""
    own = setting.integers(-LARGEST_SEED, LARGEST_SEED, num_requests, seed=5)
    return own.repeat_interleave(rows_of_a_request)


def check_verified(verified: reference.Verified, drafts: Tensor, accepted: Tensor, last_token_ids: Tensor) -> None:
    """verified is what accepted [num_requests, K] bool leaves of drafts [num_requests, K], then last_token_ids."""
    counts = reference.count_accepted(accepted)
    wanted = reference.assemble_tokens(drafts, last_token_ids, counts)
    check_equal("accepted tokens", verified.num_accepted_tokens, counts)
    check_equal("draft tokens", verified.num_draft_tokens, torch.full_like(counts, drafts.shape[1]))
    check_equal("tokens", verified.token_ids, wanted)


def _prepare(setting: Setting, rule: str, num_requests: int) -> Work:
    num_drafts = len(RATES)
    targets = setting.integers(0, 3, num_requests, num_drafts + 1, seed=0)
    drafts = setting.integers(0, 3, num_requests, num_drafts, seed=1)
    seeds = request_seeds(setting, num_requests, num_drafts + 1)
    positions = torch.arange(targets.numel(), device=setting.device)
    cu = torch.arange(num_requests + 1, device=setting.device, dtype=torch.int32) * num_drafts
    rates = torch.tensor(RATES, dtype=torch.float64, device=setting.device)

    def verify(target_token_ids: Tensor, draft_token_ids: Tensor) -> reference.Verified:
        if rule == "strict":
            return kernel.verify_strict(target_token_ids, draft_token_ids, cu, max_num_draft_tokens=num_drafts)
        return kernel.verify_synthetic(
            target_token_ids, draft_token_ids, cu, seeds, positions, rates, max_num_draft_tokens=num_drafts
        )

    def check() -> list[str]:
        if rule == "strict":
            accepted = reference.accept_strict(targets[:, :-1], drafts)
        else:
            uniforms = uniform(seeds, positions, Stream.ACCEPT).view_as(targets)[:, :-1]
            accepted = reference.accept_synthetic(rates, uniforms)
        last = targets.gather(1, reference.count_accepted(accepted).unsqueeze(1)).squeeze(1)
        check_verified(verify(targets.flatten(), drafts.flatten()), drafts, accepted, last)
        return ["tokens"]

    inputs = (targets.flatten(), drafts.flatten())
    input_bytes = 8 * (targets.numel() + drafts.numel())
    return Work(
        check=check,
        calls=[partial(verify, *own) for own in setting.copies(input_bytes, *inputs)],
        num_bytes=input_bytes + 4 * len(cu) + 8 * (targets.numel() + 2 * num_requests),
        comes_from=setting.comes_from(input_bytes),
    )
