"""Verification by Triton kernels decides what verifier/rules.py decides, on ragged batches of mixed requests."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from kernels.cpu import rejection as compiled_ops
from kernels.cpu.probabilistic_rejection import verify_probabilistic as compiled_probabilistic
from kernels.cpu.sampling import SPLIT
from kernels.reference.sampling import fixed_point_weights, greedy_argmax
from runner.engine.request import DraftTokens, VerifyOutput
from runner.engine.sampling import SamplingRows, sample_tokens
from tests.sampling_for_tests import assert_follows, sampled_rows
from verifier import rejection_sampler
from verifier.draft_batch import DraftBatch
from verifier.rejection_sampler import RejectionSampler
from verifier.rules import Probabilistic

triton_ops = pytest.importorskip("kernels.rejection")
probabilistic_ops = pytest.importorskip("kernels.probabilistic_rejection")
truncation = pytest.importorskip("kernels.truncation")

VOCAB_SIZE = 37
RATES = [0.9, 0.6, 0.6, 0.5]


class Case:
    """Ragged requests: some greedy, some with a temperature; drafts right more often than not, some of them -1.

    Distributions are those of the logits / temperature, less a few tokens each (as top_k would have it).
    """

    def __init__(self, num_requests: int, seed: int, *, max_draft: int = 4) -> None:
        generator = torch.Generator().manual_seed(seed)
        lengths = torch.randint(0, max_draft + 1, (num_requests,), generator=generator).tolist()
        self.owners = torch.tensor([b for b, n in enumerate(lengths) for _ in range(n + 1)])
        self.cu = [0]
        for length in lengths:
            self.cu.append(self.cu[-1] + length)
        num_rows, num_drafts = len(self.owners), self.cu[-1]
        self.is_bonus = torch.zeros(num_rows, dtype=torch.bool)
        self.is_bonus[torch.tensor(self.cu[1:]) + torch.arange(num_requests)] = True
        self.logits = torch.randn(num_rows, VOCAB_SIZE, generator=generator) * 2.5
        self.probs = (self.logits[~self.is_bonus] + torch.randn(num_drafts, VOCAB_SIZE, generator=generator)).softmax(
            -1
        )
        self.draft_ids = torch.multinomial(self.probs, 1, generator=generator).squeeze(1)
        self.draft_ids[torch.rand(num_drafts, generator=generator) < 0.06] = -1
        self.is_greedy = (self.owners % 4) == 1
        self.temperatures = torch.where(self.is_greedy, 1.0, 0.6 + (self.owners % 3) * 0.4)
        self.seeds = 1000 + self.owners
        steps = torch.cat([torch.arange(n + 1) for n in lengths])
        self.positions = 5 + self.owners % 7 + steps
        scaled = self.logits / self.temperatures.unsqueeze(1)
        self.cuts = scaled.sort(dim=1).values[:, 3].where(~self.is_greedy, float("-inf"))
        self.processed = scaled.masked_fill(scaled < self.cuts.unsqueeze(1), float("-inf"))
        self.rows = SamplingRows(
            vocab_size=VOCAB_SIZE,
            is_greedy=tuple(self.is_greedy.tolist()),
            seeds=self.seeds,
            positions=self.positions,
            random_row_idx=(~self.is_greedy).nonzero().squeeze(1),
        )
        self.max_draft = max(lengths)

    def by_rules(self, method: str, *, has_probs: bool = True) -> VerifyOutput:
        sampler = RejectionSampler(
            rejection_sample_method=method, synthetic_conditional_rates=RATES if method == "synthetic" else None
        )
        drafts = DraftTokens(
            token_ids=self.draft_ids, cu_num_draft_tokens=self.cu, probs=self.probs if has_probs else None
        )
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(rejection_sampler, "verify_chains", lambda *_: None)
            return sampler(self.processed, drafts, self.rows)

    def by_kernels(
        self,
        method: str,
        device: torch.device,
        *,
        has_probs: bool = True,
        num_padding: int = 0,
        compiled: bool = False,  # for a CPU
    ) -> Any:
        """Padding requests have rows of their own, of negative position, and no slots."""

        def padded(values: Tensor) -> Tensor:
            garbage = values[:1].expand(num_padding, *values.shape[1:])
            return torch.cat([values, garbage]).to(device)

        cu = torch.tensor([*self.cu, *[self.cu[-1]] * num_padding], dtype=torch.int32, device=device)
        drafts, probs = self.draft_ids.to(device), self.probs.to(device) if has_probs else None
        seeds, positions = padded(self.seeds), padded(self.positions)
        positions[len(self.positions) :] = -1
        keys: dict[str, Any] = {"max_num_draft_tokens": self.max_draft}
        if method == "probabilistic" and compiled:
            processed = padded(self.processed)
            keys |= {"is_greedy": padded(self.is_greedy), "argmax": padded(greedy_argmax(self.logits))}
            return compiled_probabilistic(
                processed, processed.softmax(dim=-1), drafts, probs, cu.long(), seeds, positions, **keys
            )
        if method == "probabilistic":
            maxima = self.processed.amax(dim=1)
            truncated = truncation.TruncatedRows(
                argmax=padded(greedy_argmax(self.logits)),
                maxima=padded(maxima),
                cuts=padded(self.cuts),
                masses=padded(fixed_point_weights(self.processed, maxima.unsqueeze(1)).sum(dim=1)),
            )
            keys |= {"is_greedy": padded(self.is_greedy), "temperatures": padded(self.temperatures)}
            return probabilistic_ops.verify_probabilistic(
                padded(self.logits), truncated, drafts, probs, cu, seeds, positions, **keys
            )
        targets = torch.where(positions < 0, -1, padded(sample_tokens(self.processed, self.rows)))
        ops = triton_ops
        if compiled:
            ops, cu = compiled_ops, cu.long()
        if method == "strict":
            return ops.verify_strict(targets, drafts, cu, **keys)
        rates = torch.tensor(RATES, dtype=torch.float64, device=device)
        return ops.verify_synthetic(targets, drafts, cu, seeds, positions, rates, **keys)


def assert_same(verified: Any, wanted: VerifyOutput, case: Case) -> None:
    num_requests = len(case.cu) - 1
    assert torch.equal(verified.token_ids[:num_requests].cpu(), wanted.token_ids)
    assert torch.equal(verified.num_accepted_tokens[:num_requests].cpu(), wanted.num_accepted_tokens)
    drafts = [case.draft_ids[a:b].tolist() for a, b in zip(case.cu, case.cu[1:], strict=False)]
    lengths = [(draft.index(-1) if -1 in draft else len(draft)) for draft in drafts]
    assert verified.num_draft_tokens[:num_requests].tolist() == lengths
    assert (verified.token_ids[num_requests:] == -1).all()
    assert not verified.num_accepted_tokens[num_requests:].any()
    assert not verified.num_draft_tokens[num_requests:].any()


@pytest.mark.parametrize(
    ("method", "has_probs", "num_requests"),
    [("strict", False, 60), ("synthetic", False, 30), ("probabilistic", True, 28), ("probabilistic", False, 20)],
)
def test_decisions_and_tokens_are_the_rules(
    kernel_device: torch.device, method: str, has_probs: bool, num_requests: int
) -> None:
    """All drafts accepted, rejections at several depths, plain decoding, -1, padding behind the requests."""
    case = Case(num_requests, seed=num_requests)
    if not has_probs:  # drafts that are often right: those of a drafter that draws with the target's noise
        own = sample_tokens(case.processed, case.rows)[~case.is_bonus]
        right = torch.rand(len(own), generator=torch.Generator().manual_seed(1)) < 0.8
        case.draft_ids = torch.where(right & (case.draft_ids >= 0), own, case.draft_ids)
    wanted = case.by_rules(method, has_probs=has_probs)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(probabilistic_ops, "BLOCK", 64 if has_probs else 32)
        assert_same(case.by_kernels(method, kernel_device, has_probs=has_probs, num_padding=2), wanted, case)
    on_cpu = case.by_kernels(method, torch.device("cpu"), has_probs=has_probs, num_padding=2, compiled=True)
    assert_same(on_cpu, wanted, case)
    lengths = torch.tensor(case.cu).diff()
    fates = {(n, n == length) for n, length in zip(wanted.num_accepted_tokens.tolist(), lengths.tolist(), strict=True)}
    assert len(fates) >= 6


def test_a_token_is_drawn_from_p_where_nothing_is_left_of_max_p_minus_q(kernel_device: torch.device) -> None:
    """With the noise of a recovered token: q here is more than p everywhere, as it is for p == q but for rounding."""
    case = Case(6, seed=5)
    case.probs = case.processed[~case.is_bonus].softmax(dim=-1) * 2 + 1e-3
    wanted = case.by_rules("probabilistic")
    assert_same(case.by_kernels("probabilistic", kernel_device), wanted, case)
    assert_same(case.by_kernels("probabilistic", torch.device("cpu"), compiled=True), wanted, case)
    assert int((wanted.num_accepted_tokens < torch.tensor(case.cu).diff()).sum()) >= 3


def test_a_request_gets_what_it_gets_alone(kernel_device: torch.device) -> None:
    """Through the kernels alone, from logits to tokens: cuts, draws and the rule, for one request and for all."""
    case = Case(4, seed=11, max_draft=2)

    def verify(first: int, last: int) -> Any:
        rows = slice(case.cu[first] + first, case.cu[last] + last)
        own = {
            "is_greedy": case.is_greedy[rows].to(kernel_device),
            "temperatures": case.temperatures[rows].to(kernel_device),
        }
        logits, positions = case.logits[rows].to(kernel_device), case.positions[rows].to(kernel_device)
        top_k = torch.full((len(logits),), 11, device=kernel_device)
        truncated = truncation.truncate_rows(logits, positions, top_k=top_k, **own)
        drafts = slice(case.cu[first], case.cu[last])
        cu = torch.tensor(case.cu[first : last + 1], device=kernel_device) - case.cu[first]
        return probabilistic_ops.verify_probabilistic(
            logits,
            truncated,
            case.draft_ids[drafts].to(kernel_device),
            case.probs[drafts].to(kernel_device),
            cu,
            case.seeds[rows].to(kernel_device),
            positions,
            max_num_draft_tokens=2,
            **own,
        )

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(probabilistic_ops, "BLOCK", 64)
        patch.setattr(truncation, "BLOCK", 64)
        together = verify(0, 4)
        for b in (1, 2):
            alone = verify(b, b + 1)
            assert all(torch.equal(one[0], all_[b]) for one, all_ in zip(alone, together, strict=True))


def first_tokens(num_requests: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """The first token of requests that differ in their seed and their draft, and the target's distribution."""
    generator = torch.Generator().manual_seed(3)
    logits, guess = torch.randn(2, 9, generator=generator) * 1.5
    q = guess.softmax(dim=-1)
    drafts = torch.multinomial(q, num_requests, replacement=True, generator=generator)
    rows = logits.expand(2 * num_requests, 9).to(device)
    positions = torch.tensor([4, 5], device=device).repeat(num_requests)
    verified = probabilistic_ops.verify_probabilistic(
        rows,
        truncation.truncate_rows(rows, positions),
        drafts.to(device),
        q.expand(num_requests, 9).to(device),
        torch.arange(num_requests + 1, device=device),
        torch.arange(num_requests, device=device).repeat_interleave(2),
        positions,
        max_num_draft_tokens=1,
    )
    return verified.token_ids[:, 0].cpu(), logits.double().softmax(dim=-1)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="interpreted, a request takes a tenth of a second")
def test_accepted_and_recovered_tokens_together_follow_the_target_distribution() -> None:
    token_ids, distribution = first_tokens(50_000, torch.device("cuda"))
    assert_follows(token_ids, distribution, "first token")


@pytest.mark.parametrize("has_probs", [True, False])
def test_compiled_for_a_cpu_a_long_row_gives_the_same_in_parts(has_probs: bool) -> None:
    """Rows of three splits, done by one thread or by two; the recovered token is the definition's."""
    vocab_size, num_requests = 2 * SPLIT + 37, 6
    generator = torch.Generator().manual_seed(8)
    logits = torch.randn(2 * num_requests, vocab_size, generator=generator)
    probs = (logits[::2] + torch.randn(num_requests, vocab_size, generator=generator)).softmax(dim=-1)
    drafts = probs.argmax(dim=1) if has_probs else torch.randint(vocab_size, (num_requests,), generator=generator)
    drafts[0] = -1
    seeds = torch.arange(num_requests).repeat_interleave(2)
    positions = torch.tensor([70, 71]).repeat(num_requests)
    cu = torch.arange(num_requests + 1)
    q = probs if has_probs else None

    def verify() -> Any:
        return compiled_probabilistic(
            logits, logits.softmax(dim=-1), drafts, q, cu, seeds, positions, max_num_draft_tokens=1
        )

    num_threads = torch.get_num_threads()
    try:
        found = []
        for count in (1, 2):
            torch.set_num_threads(count)
            found.append(verify())
    finally:
        torch.set_num_threads(num_threads)
    assert all(torch.equal(one, two) for one, two in zip(*found, strict=True))
    rule, rows = Probabilistic(), sampled_rows(seeds, positions, vocab_size)
    batch = DraftBatch.of_equal(drafts, q, num_requests)
    num_accepted, last = rule.verify(logits, batch, rows)
    assert torch.equal(found[0].num_accepted_tokens, num_accepted)
    assert torch.equal(found[0].token_ids, batch.assemble(num_accepted, last))
    assert {0, 1} <= set(num_accepted.tolist()) or not has_probs
