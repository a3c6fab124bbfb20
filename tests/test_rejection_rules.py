"""The rules of the rejection sampler, one step at a time: exact identities, tables, naive per-request definitions."""

from __future__ import annotations

import math
from collections.abc import Sequence

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from kernels.reference import rejection as ops
from kernels.reference.philox import Stream, gumbel, uniform
from kernels.reference.rejection import accept_probabilistic, residual, residual_one_hot
from runner.engine.request import DraftTokens, Request, VerifyOutput
from runner.engine.sampling import SamplingRows, draft_tokens, process_logits, sample_tokens
from runner.engine.sampling_params import SamplingParams
from tests.no_readback import NoReadback
from verifier.rejection_sampler import RejectionSampler

LOSSLESS = ("strict", "probabilistic", "standard", "block")
GREEDY = SamplingParams(temperature=0.0)
MIXED_PARAMS = [
    GREEDY,
    SamplingParams(),
    SamplingParams(temperature=0.7, top_k=5),
    SamplingParams(temperature=0.0, repetition_penalty=1.5),
    SamplingParams(temperature=1.5, top_p=0.8, presence_penalty=0.7),
    SamplingParams(min_p=0.05, logit_bias={2: 1.5}),
]


def make_requests(params: Sequence[SamplingParams]) -> list[Request]:
    return [
        Request(
            request_id=str(b),
            prompt_token_ids=[1, 2, 3][: 1 + b % 3],
            sampling_params=p,
            seed=1000 + b,
            output_token_ids=[2] * (b % 4),
        )
        for b, p in enumerate(params)
    ]


def flat_drafts(drafts: Sequence[Sequence[int]], probs: Tensor | None = None) -> DraftTokens:
    cu = [0]
    for draft in drafts:
        cu.append(cu[-1] + len(draft))
    token_ids = torch.tensor([token for draft in drafts for token in draft], dtype=torch.int64)
    return DraftTokens(token_ids=token_ids, cu_num_draft_tokens=cu, probs=probs)


def verify_rows(requests: Sequence[Request], drafts: Sequence[Sequence[int]], vocab_size: int) -> SamplingRows:
    longest = max(len(draft) for draft in drafts)
    padded = torch.tensor([[*draft, *[-1] * (longest - len(draft))] for draft in drafts], dtype=torch.int64)
    return SamplingRows.build(
        requests,
        [b for b, draft in enumerate(drafts) for _ in range(len(draft) + 1)],
        [i for draft in drafts for i in range(len(draft) + 1)],
        padded.view(len(drafts), longest),
        vocab_size=vocab_size,
        eos_token_ids=(0,),
        device="cpu",
    )


def verify(
    method: str,
    logits: Tensor,
    requests: Sequence[Request],
    drafts: Sequence[Sequence[int]],
    probs: Tensor | None = None,
    rates: list[float] | None = None,
) -> VerifyOutput:
    sampler = RejectionSampler(rejection_sample_method=method, synthetic_conditional_rates=rates)
    return sampler(logits, flat_drafts(drafts, probs), verify_rows(requests, drafts, logits.shape[1]))


def random_batch(
    num_requests: int, vocab_size: int, seed: int, max_draft: int = 4
) -> tuple[list[Request], list[list[int]], Tensor, Tensor]:
    """Ragged mixed requests; half of the draft tokens are likely ones, so that drafts of every fate occur."""
    generator = torch.Generator().manual_seed(seed)
    requests = make_requests([MIXED_PARAMS[b % len(MIXED_PARAMS)] for b in range(num_requests)])
    lengths = torch.randint(0, max_draft + 1, (num_requests,), generator=generator).tolist()
    logits = torch.randn(sum(lengths) + num_requests, vocab_size, generator=generator) * 2.5
    drafts, row = [], 0
    for length in lengths:
        likely = logits[row : row + length].argmax(-1)
        other = torch.randint(0, vocab_size, (length,), generator=generator)
        use_likely = torch.rand(length, generator=generator) < 0.6
        drafts.append(torch.where(use_likely, likely, other).tolist())
        row += length + 1
    probs = (torch.randn(sum(lengths), vocab_size, generator=generator) * 2.5).softmax(-1)
    return requests, drafts, logits, probs


def distributions(size: int) -> st.SearchStrategy[Tensor]:
    """Distributions with zeros, ties and ratios up to 10**6."""
    weight = st.one_of(st.just(0.0), st.integers(1, 4).map(float), st.floats(1e-3, 1e3))
    return (
        st.lists(weight, min_size=size, max_size=size)
        .filter(lambda weights: sum(weights) > 0)
        .map(lambda weights: torch.tensor(weights, dtype=torch.float64) / sum(weights))
    )


def normalised(weights: Tensor) -> Tensor:
    return weights / weights.sum()


@given(st.integers(1, 8).flatmap(lambda size: st.tuples(distributions(size), distributions(size))))
@settings(max_examples=200)
def test_accepted_and_recovered_tokens_together_follow_the_target_distribution_exactly(
    pair: tuple[Tensor, Tensor],
) -> None:
    """q * a + (1 - sum(q * a)) * r == p in float64, with r and the acceptance a taken from the rule's own functions."""
    p, q = pair
    a = torch.where(q > 0, (p / q).clamp(max=1.0), 1.0)  # the measure of {u in (0, 1): u * q < p}
    inside = (a > 0) & (a < 1)
    just_below, just_above = a * (1 - 1e-12), a * (1 + 1e-12)
    assert accept_probabilistic(p, q, just_below)[inside].all()
    assert not accept_probabilistic(p, q, just_above)[inside].any()
    assert accept_probabilistic(p, q, torch.full_like(p, 1 - 2.0**-33))[(a == 1) & (p > 0)].all()
    assert not accept_probabilistic(p, q, torch.full_like(p, 2.0**-33))[p == 0].any()
    committed = q * a + (1 - (q * a).sum()) * normalised(residual(p, q))
    assert torch.allclose(committed, p, rtol=1e-12, atol=1e-14)


@given(st.integers(1, 8).flatmap(lambda size: st.tuples(distributions(size), st.integers(0, size - 1))))
@settings(max_examples=100)
def test_a_draft_without_a_distribution_is_verified_as_one_hot_and_keeps_the_target_distribution(
    pair: tuple[Tensor, int],
) -> None:
    """Whatever the token x: accepted with probability p(x), else drawn from p without x, it comes out as p."""
    p, x = pair
    u = torch.tensor([float(p[x]) * (1 - 1e-12), float(p[x]) * (1 + 1e-12)], dtype=torch.float64)
    assert accept_probabilistic(p[x].expand(2), None, u).tolist() == [float(p[x]) > 0, False]
    rest = residual_one_hot(p.unsqueeze(0), torch.tensor([x]))[0]
    one_hot = torch.nn.functional.one_hot(torch.tensor(x), p.shape[0]).to(torch.float64)
    assert torch.equal(rest, residual(p, one_hot))
    assert torch.allclose(one_hot * p[x] + (1 - p[x]) * normalised(rest), p, rtol=1e-12, atol=1e-14)


def test_equal_distributions_leave_the_target_distribution_as_residual_and_never_nan() -> None:
    p = torch.tensor([[0.25, 0.75], [1.0, 0.0]])
    assert torch.equal(residual(p, p), p)
    assert torch.equal(residual_one_hot(p, torch.tensor([-1, 0])), p)


@pytest.mark.parametrize("method", [*LOSSLESS, "typical"])
@pytest.mark.parametrize(
    ("drafts", "targets", "expected", "accepted"),
    [
        ([[1, 2, 3]], [[1, 2, 3, 4]], [[1, 2, 3, 4]], [3]),  # all accepted: the bonus token follows
        ([[1, 2, 3]], [[1, 5, 3, 4]], [[1, 5, -1, -1]], [1]),  # what follows a mismatch does not count
        ([[1, 2, 3]], [[7, 2, 3, 4]], [[7, -1, -1, -1]], [0]),
        ([[1, 2, 3]], [[1, 2, 9, 4]], [[1, 2, 9, -1]], [2]),
        ([[]], [[6]], [[6]], [0]),  # plain decoding
        ([[], []], [[6], [2]], [[6], [2]], [0, 0]),
        ([[1, 2], [], [3], [4, 5]], [[1, 2, 8], [9], [3, 3], [5, 5, 5]],
         [[1, 2, 8], [9, -1, -1], [3, 3, -1], [5, -1, -1]], [2, 0, 1, 0]),
        ([[-1, 2], [1, -1]], [[0, 2, 3], [1, 0, 3]], [[0, -1, -1], [1, 0, -1]], [0, 1]),  # -1 is no token
    ],
)  # fmt: skip
def test_greedy_verification_tables(
    method: str,
    drafts: list[list[int]],
    targets: list[list[int]],
    expected: list[list[int]],
    accepted: list[int],
) -> None:
    flat = torch.tensor([token for row in targets for token in row])
    logits = torch.nn.functional.one_hot(flat, 10).to(torch.float32)
    output = verify(method, logits, make_requests([GREEDY] * len(drafts)), drafts)
    assert output.token_ids.tolist() == expected and output.num_accepted_tokens.tolist() == accepted


def test_strict_yields_the_targets_own_tokens_up_to_the_first_mismatch() -> None:
    requests, drafts, logits, probs = random_batch(60, 37, seed=1)
    rows = verify_rows(requests, drafts, 37)
    targets = sample_tokens(process_logits(logits, rows), rows).tolist()
    row = 0
    for b, draft in enumerate(drafts):  # make a third of the drafts right to some depth
        if b % 3 == 0:
            draft[: b % 5] = targets[row : row + min(b % 5, len(draft))]
        row += len(draft) + 1
    rows = verify_rows(requests, drafts, 37)  # other ancestors, other penalties
    targets = sample_tokens(process_logits(logits, rows), rows).tolist()
    output = verify("strict", logits, requests, drafts, probs)
    row = 0
    seen = set()
    for b, draft in enumerate(drafts):
        n = next((i for i, token in enumerate(draft) if token != targets[row + i]), len(draft))
        expected = targets[row : row + n + 1]
        assert output.token_ids[b].tolist() == expected + [-1] * (output.token_ids.shape[1] - n - 1)
        assert int(output.num_accepted_tokens[b]) == n
        seen.add((n, len(draft)))
        row += len(draft) + 1
    assert len(seen) >= 10  # rejections and full acceptances at several depths


@pytest.mark.parametrize("has_probs", [False, True])
def test_the_probabilistic_rule_is_its_definition_request_by_request(has_probs: bool) -> None:
    """One token after another with Python's control flow: u, p, q and noise looked up by (seed, position)."""
    requests, drafts, logits, probs = random_batch(80, 37, seed=2)
    output = verify("probabilistic", logits, requests, drafts, probs if has_probs else None)
    processed = process_logits(logits, verify_rows(requests, drafts, 37))
    row = flat = 0
    fates = set()
    for b, (request, draft) in enumerate(zip(requests, drafts, strict=True)):
        tokens: list[int] = []
        seed = torch.tensor([request.seed])
        for i in range(len(draft) + 1):
            position = torch.tensor([request.num_tokens + i])
            target = processed[row + i]
            noise = gumbel(seed, position, Stream.TARGET, vocab_size=37)[0]
            if request.sampling_params.is_greedy:
                token = int(target.argmax())
                rejected = i < len(draft) and token != draft[i]
            elif i == len(draft):
                token, rejected = int((target + noise).argmax()), False
            else:
                p = target.softmax(-1)
                q = probs[flat + i] if has_probs else torch.eye(37)[draft[i]]
                u = float(uniform(seed, position, Stream.ACCEPT))
                rejected = not u * float(q[draft[i]]) < float(p[draft[i]])
                noise = gumbel(seed, position, Stream.RESIDUAL, vocab_size=37)[0]
                token = int(((p - q).clamp(min=0).log() + noise).argmax()) if rejected else draft[i]
                assert not rejected or token != draft[i]
            tokens.append(token)
            fates.add((request.sampling_params.is_greedy, rejected, i == len(draft)))
            if rejected:
                break
        assert output.token_ids[b].tolist() == tokens + [-1] * (output.token_ids.shape[1] - len(tokens))
        assert int(output.num_accepted_tokens[b]) == len(tokens) - 1
        row += len(draft) + 1
        flat += len(draft)
    assert len(fates) == 6


@pytest.mark.parametrize("has_probs", [False, True])
def test_the_block_rule_is_its_definition_request_by_request(has_probs: bool) -> None:
    """Algorithm 2 of arXiv 2403.10444 in Python's own floats, one token after another, with noise looked up."""
    requests, drafts, logits, _ = random_batch(300, 37, seed=8, max_draft=6)
    generator = torch.Generator().manual_seed(8)
    is_draft = torch.tensor([i < len(draft) for draft in drafts for i in range(len(draft) + 1)])
    # Distributions near the target's, so that prefixes of every probability occur.
    probs = (logits[is_draft] + 1.5 * torch.randn(int(is_draft.sum()), 37, generator=generator)).softmax(-1)
    drawn = iter(torch.multinomial(probs, 1, generator=generator).flatten().tolist())
    drafts = [[next(drawn) for _ in draft] for draft in drafts]
    output = verify("block", logits, requests, drafts, probs if has_probs else None)
    processed = process_logits(logits, verify_rows(requests, drafts, 37))
    row = flat = 0
    fates = set()
    for b, (request, draft) in enumerate(zip(requests, drafts, strict=True)):
        seed, step = torch.tensor([request.seed]), torch.tensor([request.num_tokens])
        p = processed[row : row + len(draft) + 1].softmax(-1).double()
        guesses = probs[flat : flat + len(draft)] if has_probs else torch.eye(37)[draft]
        guesses = guesses.double()
        kept, joint, scale = 0, 1.0, 1.0
        for i, token in enumerate(draft, start=1):
            if request.sampling_params.is_greedy:
                if kept == i - 1 and int(processed[row + i - 1].argmax()) == token:
                    kept = i
                continue
            joint = min(joint * float(p[i - 1, token]) / float(guesses[i - 1, token]), 1.0)
            if i == len(draft):
                h = joint
            else:
                mass = float((joint * p[i] - guesses[i]).clamp(min=0).sum())
                h = mass / (mass + 1 - joint) if joint < 1 else 1.0
            u = float(uniform(seed, step + i - 1, Stream.ACCEPT, step))
            if u < h:
                fates.add(("gap", i > kept + 1))
                kept, scale = i, joint
        position = torch.tensor([request.num_tokens + kept])
        rejected = kept < len(draft)
        fates.add((request.sampling_params.is_greedy, rejected))
        if request.sampling_params.is_greedy:
            last = int(processed[row + kept].argmax())
        else:
            stream = Stream.RESIDUAL if rejected else Stream.TARGET
            noise = gumbel(seed, position, stream, vocab_size=37)[0]
            logits = (scale * p[kept] - guesses[kept]).clamp(min=0).log() if rejected else processed[row + kept]
            last = int((logits + noise).argmax())
            unscaled = (p[kept] - guesses[kept]).clamp(min=0).log() if rejected else logits
            fates.add(("scale matters", last != int((unscaled + noise).argmax())))
        tokens = [*draft[:kept], last]
        assert output.token_ids[b].tolist() == tokens + [-1] * (output.token_ids.shape[1] - len(tokens))
        assert int(output.num_accepted_tokens[b]) == kept
        row += len(draft) + 1
        flat += len(draft)
    assert fates >= {(True, True), (True, False), (False, True), (False, False), ("gap", False)}
    assert fates >= {("gap", True), ("scale matters", True)} or not has_probs


def test_typical_acceptance_has_exactly_medusas_region() -> None:
    """p(x) > min(posterior_threshold, posterior_alpha * exp(-H)); flat and peaked distributions, tokens of mass 0."""
    generator = torch.Generator().manual_seed(9)
    p = (torch.randn(400, 6, generator=generator).double() * torch.linspace(0, 8, 400).unsqueeze(1)).softmax(-1)
    p[::7, 2] = 0.0  # a token that top-k has taken away
    p /= p.sum(dim=1, keepdim=True)
    entropies = ops.entropy(p)
    sides = set()
    for threshold, alpha in ((0.09, 0.3), (0.3, 0.09), (1.0, 1.0), (0.01, 1.0)):
        keys = {"posterior_threshold": threshold, "posterior_alpha": alpha}
        accepted = torch.stack([ops.accept_typical(p[:, x], entropies, **keys) for x in range(6)], dim=1)
        for probs, row in zip(p.tolist(), accepted.tolist(), strict=True):
            scaled = alpha * math.exp(math.fsum(x * math.log(x) for x in probs if x > 0))
            bound = min(threshold, scaled)
            if min(abs(x - bound) for x in probs) > 1e-12:
                assert row == [x > bound for x in probs]
            sides.add(scaled < threshold)
    assert sides == {True, False}


def test_typical_acceptance_ends_with_the_targets_own_token() -> None:
    requests, drafts, logits, probs = random_batch(80, 37, seed=10)
    rows = verify_rows(requests, drafts, 37)
    processed = process_logits(logits, rows)
    targets = sample_tokens(processed, rows).tolist()
    target_probs = processed.double().softmax(-1)
    output = verify("typical", logits, requests, drafts, probs)
    row, fates = 0, set()
    for b, (request, draft) in enumerate(zip(requests, drafts, strict=True)):
        kept = 0
        for token in draft:
            p = target_probs[row + kept]
            bound = min(0.09, 0.3 * math.exp(float((p * p.clamp(min=1e-300).log()).sum())))
            greedy = request.sampling_params.is_greedy
            if token != targets[row + kept] if greedy else float(p[token]) <= bound:
                break
            fates.add((greedy, token == targets[row + kept]))
            kept += 1
        assert output.token_ids[b, : kept + 1].tolist() == [*draft[:kept], targets[row + kept]]
        assert int(output.num_accepted_tokens[b]) == kept
        row += len(draft) + 1
    assert fates == {(True, True), (False, True), (False, False)}  # tokens the target would not have drawn stay


@pytest.mark.parametrize("has_probs", [False, True])
@pytest.mark.parametrize("method", [*LOSSLESS, "typical", "synthetic"])
def test_a_request_in_a_mixed_ragged_batch_gets_what_it_gets_alone(method: str, has_probs: bool) -> None:
    requests, drafts, logits, probs = random_batch(40, 131, seed=3)
    rates = [0.8, 0.7, 0.6, 0.5] if method == "synthetic" else None
    together = verify(method, logits, requests, drafts, probs if has_probs else None, rates)
    row = flat = 0
    for b, draft in enumerate(drafts):
        own_rows, own_drafts = slice(row, row + len(draft) + 1), slice(flat, flat + len(draft))
        own_probs = probs[own_drafts] if has_probs else None
        alone = verify(method, logits[own_rows], requests[b : b + 1], [draft], own_probs, rates)
        assert torch.equal(alone.token_ids[0], together.token_ids[b, : len(draft) + 1])
        assert (together.token_ids[b, len(draft) + 1 :] == -1).all()
        assert torch.equal(alone.num_accepted_tokens[0], together.num_accepted_tokens[b])
        row, flat = row + len(draft) + 1, flat + len(draft)


@pytest.mark.parametrize("params", [SamplingParams(), SamplingParams(temperature=0.6, top_k=7, top_p=0.9)])
def test_a_drafter_equal_to_the_target_is_always_accepted(params: SamplingParams) -> None:
    """Coupled under strict, and with a distribution p == q: the same processors make the same distributions."""
    torch.manual_seed(4)
    requests = make_requests([params] * 200)
    logits = torch.randn(400, 64)
    rows = SamplingRows.build(
        requests, list(range(200)), [0] * 200, None, vocab_size=64, eos_token_ids=(0,), device="cpu"
    )
    cells = [("coupled", "strict"), ("probabilistic", "probabilistic"), ("coupled", "standard")]
    for draft_method, method in [*cells, ("probabilistic", "block")]:
        ids, probs = draft_tokens(process_logits(logits[::2], rows), rows, draft_method, need_probs=True)
        output = verify(method, logits, requests, [[token] for token in ids.tolist()], probs)
        assert output.num_accepted_tokens.tolist() == [1] * 200, (draft_method, method)


def test_minus_one_is_never_accepted_and_removes_nothing_from_the_distribution() -> None:
    requests = make_requests([SamplingParams()] * 50)
    logits = torch.zeros(100, 2)
    logits[:, 0] = 100.0  # token 0 has all the mass, and is what -1 would be clamped to
    probs = torch.tensor([[1e-9, 1.0]]).expand(50, 2)
    for q in (None, probs):
        for method in ("probabilistic", "block", "typical"):
            output = verify(method, logits, requests, [[-1]] * 50, q)
            assert output.token_ids.tolist() == [[0, -1]] * 50
    always = verify("synthetic", logits, requests, [[-1]] * 50, None, [1.0])
    assert not always.num_accepted_tokens.any()


def test_synthetic_acceptance_ignores_the_tokens_and_ends_with_the_targets_own() -> None:
    requests, drafts, logits, _ = random_batch(60, 37, seed=5)
    rates = [0.9, 0.6, 0.6, 0.6]
    rows = verify_rows(requests, drafts, 37)
    targets = sample_tokens(process_logits(logits, rows), rows)
    uniforms = uniform(rows.seeds, rows.positions, Stream.ACCEPT).tolist()
    output = verify("synthetic", logits, requests, drafts, None, rates)
    row = 0
    for b, draft in enumerate(drafts):
        n = next((i for i in range(len(draft)) if uniforms[row + i] >= rates[i]), len(draft))
        assert output.token_ids[b, : n + 1].tolist() == [*draft[:n], int(targets[row + n])]
        assert int(output.num_accepted_tokens[b]) == n
        row += len(draft) + 1
    always = verify("synthetic", logits, requests, drafts, None, [1.0] * 4)
    assert always.num_accepted_tokens.tolist() == [len(draft) for draft in drafts]
    assert not verify("synthetic", logits, requests, drafts, None, [0.0] * 4).num_accepted_tokens.any()


def test_a_misconfigured_sampler_is_refused() -> None:
    with pytest.raises(ValueError, match=r"rejection_sample_method must be one of strict, .* got 'fly'"):
        RejectionSampler(rejection_sample_method="fly")
    with pytest.raises(ValueError, match=r"posterior_alpha must be in \(0, 1\], got 0"):
        RejectionSampler(rejection_sample_method="typical", posterior_alpha=0.0)
    with pytest.raises(ValueError, match="must be given for rejection_sample_method 'synthetic'"):
        RejectionSampler(rejection_sample_method="synthetic")
    with pytest.raises(ValueError, match="and for no other"):
        RejectionSampler(rejection_sample_method="strict", synthetic_conditional_rates=[0.5])
    with pytest.raises(ValueError, match=r"must be in \[0, 1\]"):
        RejectionSampler(rejection_sample_method="synthetic", synthetic_conditional_rates=[0.5, 1.5])
    requests, drafts, logits, _ = random_batch(8, 11, seed=6)
    with pytest.raises(ValueError, match=r"one rate per draft token \(4\), got 1"):
        verify("synthetic", logits, requests, drafts, None, [0.5])


@pytest.mark.parametrize("method", [*LOSSLESS, "typical", "synthetic"])
def test_a_step_reads_nothing_back_to_the_host(method: str) -> None:
    requests, drafts, logits, probs = random_batch(30, 37, seed=7)
    sampler = RejectionSampler(
        rejection_sample_method=method, synthetic_conditional_rates=[0.5] * 4 if method == "synthetic" else None
    )
    flat = flat_drafts(drafts, probs)
    with NoReadback():  # type: ignore[no-untyped-call]
        rows = verify_rows(requests, drafts, 37)
        sampler(logits, flat, rows)
        for draft_method in ("greedy", "probabilistic", "coupled"):
            draft_tokens(process_logits(logits, rows), rows, draft_method, need_probs=True)
