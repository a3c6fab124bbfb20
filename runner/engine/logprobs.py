"""What the target thought of tokens: logprobs of its unprocessed logits (vLLM's logprobs_mode "raw_logprobs").

StepLogprobs is what a step brings, still on the device; TokenLogprobs is what a request keeps of it. The rows were
computed for verification anyway, so nothing here runs a model.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True, kw_only=True)
class TokenLogprobs:
    """A token's logprob and rank given all tokens before it, beside the likeliest tokens of its place."""

    token_id: int
    logprob: float  # a float32
    rank: int  # 1 = the likeliest; among equals the lower id comes first
    top_token_ids: tuple[int, ...]  # the likeliest first, as many as were asked for
    top_logprobs: tuple[float, ...]


@dataclass(frozen=True, kw_only=True)
class AskedRows:
    """How many rows of StepLogprobs belong to a request, and how many of a row's top tokens it wants."""

    num_prompt_rows: int = 0
    num_output_rows: int = 0  # one for each draft and the bonus; those behind the first rejection mean nothing
    num_prompt_top: int = 0
    num_output_top: int = 0


@dataclass(frozen=True, kw_only=True)
class StepLogprobs:
    """Rows of kernels/reference/top_logprobs.py: all prompt rows, then all output rows, request by request."""

    packed: Tensor  # [num_rows, 3 + 2 * num_top] float64
    asked: Mapping[str, AskedRows]  # request_id -> its rows, in their order

    def read(self) -> dict[str, tuple[list[TokenLogprobs], list[TokenLogprobs]]]:
        """request_id -> (prompt tokens, output tokens); one copy from the device."""
        rows = iter(self.packed.tolist())
        prompts = {
            request_id: [unpack(next(rows), asked.num_prompt_top) for _ in range(asked.num_prompt_rows)]
            for request_id, asked in self.asked.items()
        }
        return {
            request_id: (
                prompts[request_id],
                [unpack(next(rows), asked.num_output_top) for _ in range(asked.num_output_rows)],
            )
            for request_id, asked in self.asked.items()
        }


def unpack(row: list[float], num_top: int) -> TokenLogprobs:
    """Of one row of kernels/reference/top_logprobs.py, the num_top likeliest of those that it has."""
    widest = (len(row) - 3) // 2
    return TokenLogprobs(
        token_id=int(row[0]),
        logprob=row[1],
        rank=int(row[2]),
        top_token_ids=tuple(int(token_id) for token_id in row[3 : 3 + num_top]),
        top_logprobs=tuple(row[3 + widest : 3 + widest + num_top]),
    )
