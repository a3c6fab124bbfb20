"""What the requests of whole steps ask for, as far as layouts go by it: steps of other flags are captured anew."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from runner.engine.device_processors import ProcessorFlags
from runner.engine.request import Request

TOP_LOGPROBS = (0, 5, 20, 64)  # rooms for the likeliest tokens beside each token's own


@dataclass(frozen=True, kw_only=True)
class SamplingFlags:
    """What any request of a batch asks for. Kernels are given no tensor of the rest."""

    all_greedy: bool
    min_p: bool
    top_k: bool
    top_p: bool
    processors: ProcessorFlags | None
    caps: bool  # a request may want fewer drafts than the others
    num_top_logprobs: int | None  # room for those of any request; None: nobody asks for logprobs

    @property
    def grammars(self) -> bool:
        """Whether a request follows one, so that the host has a part in every step."""
        return self.processors is not None and self.processors.grammars

    @classmethod
    def of(cls, requests: Sequence[Request], eos_token_ids: tuple[int, ...]) -> SamplingFlags:
        params = [request.sampling_params for request in requests]
        drawn = [p for p in params if not p.is_greedy]
        asked = [p.logprobs for p in params if p.logprobs is not None]
        processors = ProcessorFlags.of(requests, eos_token_ids)
        return cls(
            all_greedy=not drawn,
            min_p=any(p.min_p > 0.0 for p in drawn),
            top_k=any(p.top_k > 0 for p in drawn),
            top_p=any(p.top_p < 1.0 for p in drawn),
            processors=processors,
            caps=processors is not None or any(p.max_draft_tokens is not None for p in params),
            num_top_logprobs=_rounded_up(max(asked)) if asked else None,
        )


def _rounded_up(num_top: int) -> int:
    return next(size for size in TOP_LOGPROBS if size >= num_top)
