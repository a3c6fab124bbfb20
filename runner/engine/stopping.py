"""When a request ends: eos, stop tokens, stop strings, length.

Tokens of one step are judged one by one, in order, so that the cut does not depend on how many arrived together.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass

from runner.engine.request import Request

Decode = Callable[[Sequence[int], bool], str]  # token ids, and whether special tokens are left out


@dataclass(frozen=True, kw_only=True)
class Stop:
    """Where a request's new tokens end."""

    num_tokens: int  # how many of the new tokens are kept
    finish_reason: str | None = None  # "stop" | "length"; None = goes on
    stop_reason: int | str | None = None


@dataclass(frozen=True, kw_only=True)
class StopRules:
    eos_token_ids: frozenset[int]
    max_model_len: int
    decode: Decode | None = None  # needed for stop strings only
    special_token_ids: frozenset[int] = frozenset()  # those that it may leave out

    def apply(self, request: Request, new_token_ids: list[int]) -> Stop:
        """How many of the new tokens stay, and whether the request ends there. Changes nothing."""
        params = request.sampling_params
        num_output = len(request.output_token_ids)
        # A token that prints holds a byte at least, so a stop string spans as many tokens as it has bytes, not
        # characters; a few more in front keep multi-byte characters whole.
        span = params.longest_stop + 8
        silent = self.special_token_ids if params.skip_special_tokens else frozenset[int]()
        recent = _last_printed(request, span, silent) if params.stop else []  # that a new stop string may begin with
        for kept, token in enumerate(new_token_ids, start=1):
            if num_output + kept > params.min_tokens and token not in silent:
                recent.append(token)
            may_stop = num_output + kept >= params.min_tokens
            # A grammar has an end of text said too early only where nothing else can follow.
            may_end = (may_stop or params.structured_outputs is not None) and not params.ignore_eos
            if may_end and token in self.eos_token_ids:
                return Stop(num_tokens=kept, finish_reason="stop")
            if may_stop:
                if token in params.stop_token_ids:
                    return Stop(num_tokens=kept, finish_reason="stop", stop_reason=token)
                if params.stop and self.decode is not None:
                    tail = self.decode(recent[-span:], params.skip_special_tokens)
                    found = next((text for text in params.stop if text in tail), None)
                    if found is not None:
                        return Stop(num_tokens=kept, finish_reason="stop", stop_reason=found)
            if num_output + kept >= params.max_tokens or request.num_tokens + kept >= self.max_model_len:
                return Stop(num_tokens=kept, finish_reason="length")
        return Stop(num_tokens=len(new_token_ids))


def _last_printed(request: Request, count: int, silent: Collection[int]) -> list[int]:
    """The last tokens behind min_tokens that print something, fewer than count, in order."""
    found: list[int] = []
    output, first = request.output_token_ids, request.sampling_params.min_tokens
    for index in range(len(output) - 1, first - 1, -1):
        if len(found) == count - 1:
            break
        if output[index] not in silent:
            found.append(output[index])
    return found[::-1]
