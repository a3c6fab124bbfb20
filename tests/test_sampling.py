"""Every processor means what its definition says, sees the right history, and never looks at another row."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from kernels.reference import sampling as ops
from kernels.reference.philox import Stream, gumbel
from runner.engine.request import Request
from runner.engine.sampling import SamplingRows, draft_tokens, process_logits, sample_tokens
from runner.engine.sampling_params import SamplingParams

NEG_INF = float("-inf")
EOS = (0,)


def make_request(
    params: SamplingParams, *, seed: int = 11, prompt: Sequence[int] = (1, 2, 3), output: Sequence[int] = ()
) -> Request:
    return Request(
        request_id="r",
        prompt_token_ids=list(prompt),
        sampling_params=params,
        seed=seed,
        output_token_ids=list(output),
    )


def rows_of(requests: Sequence[Request], vocab_size: int) -> SamplingRows:
    """One row a request, no drafts."""
    return SamplingRows.build(
        requests,
        list(range(len(requests))),
        [0] * len(requests),
        None,
        vocab_size=vocab_size,
        eos_token_ids=EOS,
        device="cpu",
    )


def process(logits: Sequence[float], params: SamplingParams, **history: Sequence[int]) -> list[float]:
    rows = rows_of([make_request(params, **history)], len(logits))  # type: ignore[arg-type]
    return process_logits(torch.tensor([logits]), rows)[0].tolist()


# Halves between -6 and 6: ties are frequent, as quantised heads make them.
tied_logits = st.lists(st.integers(-12, 12).map(lambda x: x / 2), min_size=1, max_size=24)
# Every kind of processor, alone and together, greedy and sampled: neighbours in one batch.
MIXED_PARAMS = [
    SamplingParams(temperature=0.0),
    SamplingParams(),
    SamplingParams(temperature=0.7),
    SamplingParams(top_k=3),
    SamplingParams(top_p=0.8),
    SamplingParams(min_p=0.1),
    SamplingParams(temperature=1.3, top_k=4, top_p=0.9, min_p=0.02),
    SamplingParams(repetition_penalty=1.4),
    SamplingParams(temperature=0.0, frequency_penalty=0.9, presence_penalty=-0.4),
    SamplingParams(temperature=0.8, presence_penalty=0.5, repetition_penalty=0.7, top_p=0.7),
    SamplingParams(logit_bias={1: 3.5, 4: -2.25}, min_tokens=4),
    SamplingParams(temperature=0.0, min_tokens=4, stop_token_ids=(3,), top_k=1, top_p=0.1, min_p=0.9),
    SamplingParams(allowed_token_ids=(2, 3, 4), logit_bias={3: -1.5}),
]


@given(tied_logits, st.integers(-1, 30))
@settings(max_examples=60)
def test_top_k_keeps_the_k_likeliest_and_what_ties_with_the_last(logits: list[float], k: int) -> None:
    kept = [x > NEG_INF for x in process(logits, SamplingParams(top_k=k))]
    kth = sorted(logits, reverse=True)[k - 1] if 0 < k < len(logits) else NEG_INF
    assert kept == [x >= kth for x in logits]


@given(tied_logits, st.floats(0.01, 1.0))
@settings(max_examples=100)
def test_top_p_keeps_everything_at_least_as_likely_as_the_threshold(logits: list[float], top_p: float) -> None:
    total = math.fsum(math.exp(x) for x in logits)
    mass = {t: math.fsum(math.exp(x) for x in logits if x >= t) / total for t in logits}
    assume(top_p == 1.0 or all(abs(m - top_p) > 1e-9 for m in mass.values()))
    threshold = min(logits) if top_p == 1.0 else max(t for t in logits if mass[t] >= top_p)
    kept = [x > NEG_INF for x in process(logits, SamplingParams(top_p=top_p))]
    assert kept == [x >= threshold for x in logits]


@given(tied_logits, st.floats(0.0, 1.0))
@settings(max_examples=60)
def test_min_p_drops_tokens_less_likely_than_a_share_of_the_likeliest(logits: list[float], min_p: float) -> None:
    ratios = [math.exp(x - max(logits)) for x in logits]
    assume(all(abs(ratio - min_p) > 1e-5 * ratio for ratio in ratios if ratio < 1.0))
    kept = [x > NEG_INF for x in process(logits, SamplingParams(min_p=min_p))]
    assert kept == [ratio >= min_p for ratio in ratios]


def test_top_p_counts_masses_that_float32_cannot_tell_apart() -> None:
    """A head of 0.9 and 100,000 tails of about 1e-9: beside the head float32 cannot tell 60 of them from none.

    A weight is good to 2**-25 of itself, so the line lies within a few tails of where exact arithmetic draws it.
    """
    tail = math.log(1e-9) - torch.arange(100_000) * 2.0**-18  # no ties
    logits = torch.cat([torch.tensor([math.log(0.9)]), tail]).unsqueeze(0)
    weights = logits[0].double().exp()
    top_p = (0.9 + 4e-5) / float(weights.sum())
    kept = ops.apply_top_p(logits, torch.tensor([top_p], dtype=torch.float64))[0].isfinite().sum()
    assert abs(int(kept) - int((weights.cumsum(0) < top_p * weights.sum()).sum()) - 1) <= 4


def test_fixed_point_weights_are_the_exponential_to_the_stated_precision() -> None:
    distances = torch.cat([torch.zeros(1), torch.logspace(-9, 1.7, 100_000), torch.linspace(0, 40, 100_000)])
    weights = ops.fixed_point_weights(-distances.unsqueeze(0), torch.zeros(1, 1))[0]
    exact = (-distances.double()).exp() * 2.0**44
    assert bool(((weights.double() - exact).abs() <= exact * 2.0**-25 + 1).all())
    assert int(weights.max()) <= 2**44 and not weights[distances >= 30.5].any()
    shifted = ops.fixed_point_weights(torch.tensor([[NEG_INF, 8.0, 7.0, 1e30]]), torch.tensor([[8.0]]))[0]
    assert shifted[0] == 0 and torch.equal(shifted[1:3], ops.fixed_point_weights(-torch.arange(2.0), torch.zeros(1)))


@given(st.integers(0, 10_000))
@settings(max_examples=20)
def test_no_order_of_summation_moves_the_top_p_cut(seed: int) -> None:
    """The largest threshold reached, found among the row's own values by sums over the row as it is shuffled."""
    generator = torch.Generator().manual_seed(seed)
    row = (torch.randn(200, generator=generator) * 3).round(decimals=1)
    top_p = float(torch.rand(1, generator=generator, dtype=torch.float64))
    kept = ops.apply_top_p(row.unsqueeze(0), torch.tensor([top_p], dtype=torch.float64))[0].isfinite()
    weights = ops.fixed_point_weights(row.unsqueeze(0), row.max().view(1, 1))[0]
    order = torch.randperm(200, generator=generator)
    needed = max(1, math.ceil(top_p * float(weights.sum())))
    reached = [t for t in row[order].tolist() if int(weights[order][row[order] >= t].sum()) >= needed]
    assert torch.equal(kept, row >= max(reached))


def test_cut_offs_apply_in_order_min_p_top_k_top_p() -> None:
    """top_p looks at what top_k left: of (.4, .3, .2, .1), top_k=2 leaves (.571, .429), so 0.5 keeps one."""
    logits = [math.log(p) for p in (0.4, 0.3, 0.2, 0.1)]
    assert [x > NEG_INF for x in process(logits, SamplingParams(top_p=0.5))] == [True, True, False, False]
    assert [x > NEG_INF for x in process(logits, SamplingParams(top_p=0.5, top_k=2))] == [True, False, False, False]
    # min_p looks at the distribution after temperature: at T = 2 the ratio .3/.4 becomes its square root.
    assert process(logits, SamplingParams(min_p=0.8))[1] == NEG_INF
    assert process(logits, SamplingParams(min_p=0.8, temperature=2.0))[1] > NEG_INF


def test_penalties_and_bias_follow_openai_hugging_face_and_vllm() -> None:
    """Bias first; repetition over prompt and output; presence and frequency over the output alone."""
    logits = [2.0, -2.0, 2.0, -2.0, 2.0, 0.5]
    params = SamplingParams(
        repetition_penalty=2.0, frequency_penalty=0.25, presence_penalty=0.5, logit_bias={4: 1.0, 5: -1.5}
    )
    got = process(logits, params, prompt=[0, 1, 4, 5], output=[2, 2, 3])
    # token:      0 prompt  1 prompt  2 twice in output     3 once                4 (2+1)/2  5 (.5-1.5)*2
    assert got == [1.0, -4.0, 1.0 - 0.5 - 0.5, -4.0 - 0.25 - 0.5, 1.5, -2.0]


def test_a_prompt_matters_to_the_repetition_penalty_only() -> None:
    logits = [1.0, 2.0, 3.0]
    assert process(logits, SamplingParams(presence_penalty=1.0, frequency_penalty=1.0), prompt=[0, 1, 2]) == logits


def test_min_tokens_masks_eos_and_stop_tokens_until_reached() -> None:
    params = SamplingParams(min_tokens=2, stop_token_ids=(2,), ignore_eos=True)
    logits = [5.0, 1.0, 4.0, 0.0]
    assert process(logits, params, output=[1]) == [NEG_INF, 1.0, NEG_INF, 0.0]
    assert process(logits, params, output=[1, 1]) == logits


def test_temperature_zero_is_the_argmax_of_the_penalised_logits_with_ties_to_the_lowest_id() -> None:
    greedy = {"temperature": 0.0, "top_k": 1, "top_p": 0.01, "min_p": 1.0}
    logits = [3.0, 3.0, 2.0, 3.0]
    assert process(logits, SamplingParams(**greedy)) == logits  # type: ignore[arg-type]
    for params, expected in [
        (SamplingParams(**greedy), 0),  # type: ignore[arg-type]
        (SamplingParams(**greedy, logit_bias={0: -1.0}), 1),  # type: ignore[arg-type]
        (SamplingParams(**greedy, repetition_penalty=2.0), 3),  # type: ignore[arg-type]
        (SamplingParams(**greedy, min_tokens=1, stop_token_ids=(1, 3)), 2),  # type: ignore[arg-type]
    ]:
        rows = rows_of([make_request(params, prompt=[0, 1])] * 3, 4)
        processed = process_logits(torch.tensor([logits] * 3), rows)
        for method in ("greedy", "probabilistic", "coupled"):
            assert draft_tokens(processed, rows, method, need_probs=True)[1] is None
            assert draft_tokens(processed, rows, method, need_probs=False)[0].tolist() == [expected] * 3
        assert sample_tokens(processed, rows).tolist() == [expected] * 3


def test_a_sampled_token_is_the_argmax_of_logits_plus_noise_at_its_position() -> None:
    torch.manual_seed(0)
    requests = [make_request(SamplingParams(temperature=0.5), seed=2**63 + i, output=[1] * i) for i in range(9)]
    logits = torch.randn(9, 50)
    rows = rows_of(requests, 50)
    assert rows.positions.tolist() == [3 + i for i in range(9)]  # the prompt has 3 tokens: the first output is at 3
    scores = logits / 0.5 + gumbel(rows.seeds, rows.positions, Stream.TARGET, vocab_size=50)
    processed = process_logits(logits, rows)
    assert torch.equal(sample_tokens(processed, rows), scores.argmax(-1))
    drafts, probs = draft_tokens(processed, rows, "coupled", need_probs=False)
    assert torch.equal(drafts, scores.argmax(-1)) and probs is None
    drafts, probs = draft_tokens(processed, rows, "coupled", need_probs=True)
    assert probs is not None and torch.equal(probs, (logits / 0.5).softmax(-1))
    assert torch.equal(drafts, scores.argmax(-1))
    assert draft_tokens(processed, rows, "probabilistic", need_probs=False)[1] is None
    drafts, probs = draft_tokens(processed, rows, "probabilistic", need_probs=True)
    scores = logits / 0.5 + gumbel(rows.seeds, rows.positions, Stream.DRAFT, vocab_size=50)
    assert probs is not None and torch.equal(probs, (logits / 0.5).softmax(-1))
    assert torch.equal(drafts, scores.argmax(-1))
    keys = (rows.seeds, rows.positions, Stream.DRAFT, rows.positions - 2)
    drafts, _ = draft_tokens(processed, rows, "probabilistic", need_probs=True, draft_step=rows.positions - 2)
    assert torch.equal(drafts, (logits / 0.5 + gumbel(*keys, vocab_size=50)).argmax(-1))
    assert torch.equal(draft_tokens(processed, rows, "greedy", need_probs=True)[0], logits.argmax(-1))
    with pytest.raises(ValueError, match=r"draft_sample_method must be .* got 'typical'"):
        draft_tokens(processed, rows, "typical", need_probs=True)


@pytest.mark.parametrize("vocab_size", [5, 17, 33, 130, 1031])
def test_a_rows_bits_do_not_depend_on_the_rows_beside_it(vocab_size: int) -> None:
    """Alone, in batches of up to 64, permuted; greedy and sampled, with and without any processor."""
    generator = torch.Generator().manual_seed(vocab_size)
    tokens = torch.randint(0, vocab_size, (64, 6), generator=generator).tolist()
    requests = [
        make_request(MIXED_PARAMS[i % len(MIXED_PARAMS)], seed=i, prompt=tokens[i][:3], output=tokens[i][3:])
        for i in range(64)
    ]
    logits = torch.randn(64, vocab_size, generator=generator) * 4
    drafts_of: dict[str, list[tuple[torch.Tensor, torch.Tensor | None]]] = {"probabilistic": [], "coupled": []}
    alone = []
    for i, request in enumerate(requests):
        rows = rows_of([request], vocab_size)
        processed = process_logits(logits[i : i + 1], rows)
        alone.append((processed, sample_tokens(processed, rows)))
        for method, results in drafts_of.items():
            results.append(draft_tokens(processed, rows, method, need_probs=True))
    for size in (2, 3, 5, 16, 31, 64):
        chosen = torch.randperm(64, generator=generator)[:size].tolist()
        rows = rows_of([requests[i] for i in chosen], vocab_size)
        processed = process_logits(logits[chosen], rows)
        assert torch.equal(processed, torch.cat([alone[i][0] for i in chosen]))
        assert torch.equal(sample_tokens(processed, rows), torch.cat([alone[i][1] for i in chosen]))
        for method, results in drafts_of.items():
            ids, probs = draft_tokens(processed, rows, method, need_probs=True)
            assert torch.equal(ids, torch.cat([results[i][0] for i in chosen]))
            for place, i in enumerate(chosen):
                if (probs_alone := results[i][1]) is not None:
                    assert probs is not None and torch.equal(probs[place], probs_alone[0])


def test_a_draft_row_is_processed_as_if_its_ancestors_were_output() -> None:
    """Row i of a request sees prompt, output and the i drafts before it: bit for bit the row of that longer request."""
    vocab_size, num_drafts = 19, 4
    generator = torch.Generator().manual_seed(5)
    requests = [
        make_request(params, seed=i, prompt=[1, 4, 4], output=[5, 2][: i % 3]) for i, params in enumerate(MIXED_PARAMS)
    ]
    draft_token_ids = torch.randint(0, 8, (len(requests), num_drafts), generator=generator)
    draft_token_ids[::3, 2:] = -1  # ragged
    depths = [2 if b % 3 == 0 else num_drafts for b in range(len(requests))]
    pairs = [(b, n) for b, depth in enumerate(depths) for n in range(depth + 1)]
    logits = torch.randn(len(pairs), vocab_size, generator=generator)
    request_idx, num_ancestors = [b for b, _ in pairs], [n for _, n in pairs]
    rows = SamplingRows.build(
        requests,
        request_idx,
        num_ancestors,
        draft_token_ids,
        vocab_size=vocab_size,
        eos_token_ids=EOS,
        device="cpu",
    )
    grown = [
        make_request(
            requests[b].sampling_params,
            seed=requests[b].seed,
            prompt=[1, 4, 4],
            output=requests[b].output_token_ids + draft_token_ids[b, :n].tolist(),
        )
        for b, n in pairs
    ]
    grown_rows = rows_of(grown, vocab_size)
    processed = process_logits(logits, rows)
    assert torch.equal(rows.positions, grown_rows.positions)
    assert torch.equal(processed, process_logits(logits, grown_rows))
    assert torch.equal(sample_tokens(processed, rows), sample_tokens(processed, grown_rows))
    for request in requests:  # what a request keeps from step to step counts on
        request.output_token_ids += [7, 2]
    later = [make_request(r.sampling_params, prompt=[1, 4, 4], output=r.output_token_ids) for r in requests]
    logits = logits[: len(requests)]
    again, fresh = (process_logits(logits, rows_of(batch, vocab_size)) for batch in (requests, later))
    assert torch.equal(again, fresh)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
def test_processing_never_changes_its_input_and_returns_float32(dtype: torch.dtype) -> None:
    logits = torch.randn(len(MIXED_PARAMS), 23).to(dtype)
    copy = logits.clone()
    rows = rows_of([make_request(params, output=[4, 4]) for params in MIXED_PARAMS], 23)
    processed = process_logits(logits, rows)
    sample_tokens(processed, rows)
    assert processed.dtype == torch.float32 and torch.equal(logits, copy)
    assert torch.equal(processed, process_logits(logits.to(torch.float32), rows))


def test_rows_that_ask_for_nothing_cost_nothing() -> None:
    logits = torch.randn(3, 9)
    for params in (SamplingParams(temperature=0.0, top_k=3, top_p=0.5), SamplingParams()):
        assert process_logits(logits, rows_of([make_request(params)] * 3, 9)) is logits


@pytest.mark.parametrize("named", [{"logit_bias": {9: 1.0}}, {"stop_token_ids": (3, 12)}, {"allowed_token_ids": [-1]}])
def test_a_token_outside_the_vocabulary_is_refused_by_name(named: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=rf"{next(iter(named))} must name tokens in \[0, 8\] \(the vocabulary\), got"):
        SamplingParams(**named).check_token_ids(9)
