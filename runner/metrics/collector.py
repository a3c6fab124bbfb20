"""Observes steps and finished requests, keeps sums and records, and makes the summary that every report shows."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any, Literal

from runner.metrics.in_parts import InParts
from runner.metrics.rates import (
    acceptance,
    by_source,
    categories,
    draft_tree_depth,
    inter_token_ms,
    per_output_token_ms,
    percentiles,
    ratio,
    speedup,
    to_first_token_ms,
)
from runner.metrics.records import RequestRecord, StepPoint, StepRecord
from runner.metrics.totals import RequestTotals

# What a summary keeps of method=none.
BASELINE_KEYS = ("output_tokens_per_second", "output_tokens_per_second_range", "tpot_ms", "measured_in")
# The timed parts of a step; what remains of it is "other". A whole step on the device is not told apart.
PHASES = ("propose", "verify", "whole_step", "schedule")


class MetricsCollector:
    """Takes steps and requests as they finish; `summary` may be called at any time.

    `num_finished_requests`, `num_output_tokens`, `num_drafts` and `num_accepted_tokens` are live counts for a progress
    bar: they follow the steps, so they include requests that have not finished or have failed.
    """

    def __init__(self) -> None:
        self.records: list[RequestRecord] = []  # in the order they finished
        self.step_points: list[StepPoint] = []
        self.num_finished_requests = 0
        self.num_output_tokens = 0
        self.num_drafts = 0
        self.num_accepted_tokens = 0
        self.num_decoding_steps = 0
        self.steps_in_parts = Counter[InParts]()  # of the decoding ones
        self.decoding_steps_by_budget = Counter[int]()  # tokens that the load allowed a draft -> steps
        self.core_wait_share: float | None = None  # of the pass (`CoreWait.share`), where whoever runs it says so
        self._phase_seconds = dict.fromkeys(PHASES, 0.0)

    def observe(self, step: StepRecord) -> None:
        """Adds one step."""
        drafts = [r for r in step.request_steps if r.num_draft_tokens > 0]
        point = StepPoint(
            finished_at=step.finished_at,
            total_seconds=step.total_seconds,
            num_requests=len(step.request_steps),
            num_drafts=len(drafts),
            num_draft_tokens=sum(r.num_draft_tokens for r in drafts),
            num_accepted_tokens=sum(r.num_accepted_tokens for r in drafts),
            num_output_tokens=sum(r.num_output_tokens for r in step.request_steps),
            is_decoding=step.is_decoding,
            is_whole=step.in_parts is None if step.is_decoding and step.in_parts is not InParts.UNCAPTURED else None,
        )
        self.step_points.append(point)
        for phase in PHASES:
            self._phase_seconds[phase] += step.seconds.get(phase, 0.0)
        if step.is_decoding:
            self.num_decoding_steps += 1
            self.decoding_steps_by_budget[step.max_draft_tokens] += 1
            if step.in_parts is not None:
                self.steps_in_parts[step.in_parts] += 1
        self.num_output_tokens += point.num_output_tokens
        self.num_drafts += point.num_drafts
        self.num_accepted_tokens += point.num_accepted_tokens

    def finish(self, record: RequestRecord) -> None:
        """Adds one request that is over, finished or failed."""
        name = f"request {record.request_id}"
        for drafted, depth, accepted in record.drafts:
            assert accepted <= depth <= drafted, f"{name}: accepted {accepted} of {drafted} tokens, {depth} deep"
        steps = zip(record.num_draft_tokens, record.num_accepted_tokens, record.tokens_per_step, strict=True)
        for drafted, accepted, committed in steps:
            assert 0 <= accepted <= drafted, f"{name}: accepted {accepted} of {drafted} drafted tokens"
            assert committed in (accepted, accepted + 1), f"{name}: {committed} tokens from {accepted} accepted ones"
            assert committed > 0, f"{name}: an entry for a step that yielded no token"
        assert len(record.token_times) == len(record.tokens_per_step), f"{name}: one arrival time a step"
        assert sum(record.tokens_per_step) == len(record.token_ids), f"{name}: the tokens of the steps add up"
        self.records.append(record)
        self.num_finished_requests += 1

    def summary(
        self,
        *,
        method: str,
        num_speculative_tokens: int,
        baseline: Mapping[str, Any] | None = None,
        identical_to_baseline: Mapping[str, int] | None = None,
        identical_between_repeats: Mapping[str, int] | None = None,
        lossless: Literal["tokens", "unguaranteed", "distribution", False] | None = None,
        notes: Sequence[str] = (),
        machine: Mapping[str, Any] | None = None,
        core_wait_share: float | None = None,
        peak_memory_bytes: int | None = None,
        num_preemptions: int = 0,
    ) -> dict[str, Any]:
        """The numbers of one pass over the workload, ready for metrics.json.

        A request-step is one request in one step that yielded tokens; a draft is a request-step with >= 1 drafted
        token; accepted tokens are committed draft tokens (after eos and max_tokens). Failed requests are only counted.
        A zero denominator gives None.

        - acceptance_rate: accepted / drafted tokens; of a draft tree, all of its nodes count as drafted.
        - draft_tree_depth: levels of the deepest draft tree; None where every draft was a chain.
        - mean_acceptance_length: 1 + accepted tokens / drafts, pooled over the run (as vLLM and SGLang report it).
        - mean_acceptance_length_per_request: unweighted mean of each request's own 1 + accepted / drafts; requests
          without a draft are left out (SpecForge, SPEED-Bench).
        - tokens_per_step: output tokens / request-steps, those without a draft included.
        - acceptance_per_position[i]: drafts whose token i was accepted / drafts (unconditional, as vLLM). Positions
          count from the text: in a draft tree they are depths.
        - conditional_acceptance_per_position[i]: the same / drafts that have a token i and all before it accepted.
        - acceptance_length_histogram: acceptance length (1 + accepted, as text) -> number of drafts.
        - acceptance_by_source: proposer -> counts, acceptance_rate and mean_acceptance_length of its own drafts, where
          several draft (hybrid, suffix_recycling); a draft is its first token's proposer's, the grammar's where it
          allowed no other. Empty where one drafts.
        - num_decoding_steps: steps in which at least one request decodes; num_whole_steps: those of them that ran
          whole, without the host between drafts and verification.
        - decoding_steps_by_budget: tokens that the load allowed each draft in a step (as text) -> number of steps.
        - whole_step_share: num_whole_steps / num_decoding_steps; None where none shall be whole, or none can be.
        - steps_in_parts: why the other decoding steps did not run whole (`InParts`) -> number of steps.
        - prefix_cache_queries: prompt tokens of requests that the prefix cache was asked for; prefix_cache_hits: those
          that it had when their request was first admitted; prefix_cache_hit_rate: hits / queries.
        - duration_s: time spent in steps; pauses between calls of generate, until a request arrives, or while a grammar
          is compiled do not count.
        - output_tokens_per_second: output tokens / duration_s.
        - ttft_ms: per request, first token - arrival; with request_rate also the wait for a place in the batch.
        - tpot_ms: per request with n >= 2 tokens, (last token - first token) / (n - 1).
        - itl_ms: per token after a request's first step. The gap between two steps' arrivals is divided evenly over
          the tokens of the later one, so that its mean agrees with tpot when a step yields several tokens.
        - The three have {median, p20, p80, p99}, linear between order statistics.
        - time_share: part of duration_s in propose, verify, whole_step (both in one), schedule and other; adds up to 1.
        - speedup: median tpot of method=none / median tpot, both of the same run or sweep; 1.0 for method=none itself.
        - baseline: output_tokens_per_second and tpot_ms of method=none in the same run, or in the earlier point of the
          same sweep that measured_in names; None where it was not run.
        - repeats: passes that were made of each. With several, speedup and output_tokens_per_second (the baseline's
          too) are medians over them, speedup_range and output_tokens_per_second_range are {lowest, highest}, and every
          other number is of the middle repeat by speed-up (`runner.metrics.repeats`). With one the ranges are None.
        - lossless: what this run keeps of plain decoding's text: "tokens", the very ones, bit for bit; "unguaranteed",
          the rule keeps them, but rows depend on the batch here, so that a rounding may change one (a note says why);
          "distribution"; false, neither (typical, synthetic); None where the caller does not say.
        - identical_to_baseline: {requests, identical} of `count_identical`, over every pass of every repeat; None where
          the rule does not keep the very tokens, or where there is no baseline.
        - identical_between_repeats: the same of the method's own passes; None with one repeat, too.
        - machine: device, device_name, dtype, weights (how they are held, as fp8, or the dtype), num_threads, versions
          and commit of the run (runner.machine).
        - core_wait_share: of the time of a pass, the longest that a thread of this process had work and no core; the
          worst of all passes that are compared. None where the system does not tell (`runner.metrics.core_wait`).
        - notes: what a reader must know to read the numbers, one sentence each.
        - categories: category -> counts, acceptance, tpot_ms and speedup over its requests.

        Args:
            num_speculative_tokens: the most tokens a draft may have (0 for none); the per-position lists are this long,
                longer if a draft was.
            baseline: the summary of method=none in the same run.
        """
        finished = [record for record in self.records if not record.failed]
        num_output_tokens = sum(len(record.token_ids) for record in finished)
        totals = RequestTotals()
        totals.add(finished)
        num_request_steps = sum(len(record.tokens_per_step) for record in finished)
        duration_s = self.duration_s
        num_whole_steps = self.num_decoding_steps - self.steps_in_parts.total()
        num_captured = self.num_decoding_steps - self.steps_in_parts[InParts.UNCAPTURED]
        tpot_ms = percentiles(per_output_token_ms(finished))
        plain = None if baseline is None else {key: baseline.get(key) for key in BASELINE_KEYS}
        if method == "none" and baseline is None:  # plain decoding is its own baseline
            baseline = {"tpot_ms": tpot_ms, "categories": categories(finished, None)}
        return {
            "method": method,
            "num_speculative_tokens": num_speculative_tokens,
            "draft_tree_depth": draft_tree_depth(finished),
            "num_requests": len(finished),
            "num_failed_requests": len(self.records) - len(finished),
            "num_steps": len(self.step_points),
            "num_decoding_steps": self.num_decoding_steps,
            "num_whole_steps": num_whole_steps,
            "decoding_steps_by_budget": {
                str(count): steps for count, steps in sorted(self.decoding_steps_by_budget.items())
            },
            "whole_step_share": ratio(num_whole_steps, num_captured),
            "steps_in_parts": {str(reason): count for reason, count in sorted(self.steps_in_parts.items())},
            "num_request_steps": num_request_steps,
            "num_preemptions": num_preemptions,
            "prefix_cache_queries": totals.prefix_cache_queries,
            "prefix_cache_hits": totals.prefix_cache_hits,
            "prefix_cache_hit_rate": ratio(totals.prefix_cache_hits, totals.prefix_cache_queries),
            "num_output_tokens": num_output_tokens,
            **acceptance(finished, num_speculative_tokens),
            "acceptance_by_source": by_source(finished),
            "tokens_per_step": ratio(num_output_tokens, num_request_steps),
            "duration_s": duration_s,
            "output_tokens_per_second": ratio(num_output_tokens, duration_s),
            "output_tokens_per_second_range": None,
            "ttft_ms": percentiles(to_first_token_ms(finished)),
            "tpot_ms": tpot_ms,
            "itl_ms": percentiles(inter_token_ms(finished)),
            "time_share": self._time_share(duration_s),
            "speedup": speedup(baseline, tpot_ms),
            "speedup_range": None,
            "repeats": 1,
            "baseline": plain,
            "lossless": lossless,
            "identical_to_baseline": dict(identical_to_baseline) if identical_to_baseline is not None else None,
            "identical_between_repeats": None if identical_between_repeats is None else dict(identical_between_repeats),
            "machine": None if machine is None else dict(machine),
            "core_wait_share": core_wait_share,
            "notes": list(notes),
            "peak_memory_bytes": peak_memory_bytes,
            "categories": categories(finished, baseline),
        }

    @property
    def duration_s(self) -> float:
        return sum(point.total_seconds for point in self.step_points)

    def _time_share(self, duration_s: float) -> dict[str, float | None]:
        shares = {phase: ratio(seconds, duration_s) for phase, seconds in self._phase_seconds.items()}
        other = duration_s - sum(self._phase_seconds.values())
        return {**shares, "other": ratio(max(other, 0.0), duration_s)}  # the parts may overshoot by a rounding
