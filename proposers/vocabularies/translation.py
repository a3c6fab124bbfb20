"""Translates between the target's tokens and those of a drafter with another vocabulary, on the device."""

from __future__ import annotations

import logging

import torch
from torch import Tensor

from proposers.vocabularies.intersection import Intersection, intersect
from proposers.vocabularies.partial import KnownTokens
from proposers.vocabularies.spelling import Spelling
from runner.engine.errors import UserError

MIN_SHARED_TEXTS = 2  # with fewer the draft has nothing to choose from

logger = logging.getLogger(__name__)


class Translation:
    def __init__(self, intersection: Intersection, device: torch.device) -> None:
        self.reading = torch.tensor(intersection.reading, dtype=torch.int64, device=device)  # [target vocab]
        pairs = torch.tensor(list(intersection.pairs.items()), dtype=torch.int64, device=device)
        target_ids, self._draft_ids = pairs.unbind(dim=1)  # [num_shared] each, the target's ascending
        self.shared = KnownTokens(target_ids.contiguous(), len(self.reading))

    def to_target(self, logits: Tensor) -> Tensor:
        """Logits [num_rows, draft vocab] -> [num_rows, target vocab], without a chance for tokens that are not shared.

        Their softmax is the draft's distribution given that the token is shared.
        """
        return self.shared.over_target_vocabulary(self.of_shared(logits))

    def of_shared(self, logits: Tensor) -> Tensor:
        """Logits [num_rows, draft vocab] -> [num_rows, num_shared], as `shared` has them."""
        return logits.index_select(1, self._draft_ids)


def translate(
    vocabularies: tuple[Spelling, Spelling],
    *,
    vocab_sizes: tuple[int, int],
    model: str,
    device: torch.device,
) -> Translation | None:
    """Between the target's and the draft's vocabulary; None where they are one.

    Args:
        vocabularies, vocab_sizes: the target's, and the draft's.
        model: the draft, for errors and the log.

    Raises:
        UserError: the two have next to nothing in common.
    """
    target, draft = vocabularies
    if target.numbering == draft.numbering and vocab_sizes[0] == vocab_sizes[1]:
        logger.info("%s: numbers its tokens as the target does, use_heterogeneous_vocab changes nothing", model)
        return None
    intersection = intersect(target, draft, target_vocab_size=vocab_sizes[0], draft_vocab_size=vocab_sizes[1])
    if intersection.num_texts < MIN_SHARED_TEXTS:
        raise UserError(
            f"method.model={model} must share at least {MIN_SHARED_TEXTS} tokens with the target for "
            f"use_heterogeneous_vocab, beside special ones, got {intersection.num_texts}; choose another draft"
        )
    logger.info(
        "%s: shares %d tokens with the target, %.1f %% of its %d; the draft has %d",
        model,
        len(intersection.pairs),
        100 * len(intersection.pairs) / vocab_sizes[0],
        *vocab_sizes,
    )
    return Translation(intersection, device)
