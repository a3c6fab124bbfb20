"""How far the target would follow a head's greedy guesses, without an engine: a walk over the target's own greedy text.

From the first generated token on, a step accepts the guesses up to the first that differs from the text and goes on
behind the token that the target adds. That is what the engine counts at temperature 0, up to rounding and the
cut at the end of a request.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor


def mean_acceptance_length(
    drafts: Tensor,  # [num_texts, length, num_speculative_tokens]: guesses for the tokens behind each place
    token_ids: Tensor,  # [num_texts, length], greedy from `begins` on
    begins: Sequence[int],  # the first generated token of each text
    ends: Sequence[int],  # one behind the last
) -> float:
    """Tokens per step: the accepted guesses and the one the target adds; nan where there is no text to walk over."""
    num_guesses = drafts.shape[2]
    num_steps = num_accepted = 0
    for text, guesses, place, end in zip(token_ids.tolist(), drafts.tolist(), begins, ends, strict=True):
        while place + num_guesses < end:
            accepted = 0
            while accepted < num_guesses and guesses[place][accepted] == text[place + 1 + accepted]:
                accepted += 1
            num_steps += 1
            num_accepted += accepted
            place += accepted + 1
    return 1 + num_accepted / num_steps if num_steps else float("nan")
