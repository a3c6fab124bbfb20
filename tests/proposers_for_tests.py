"""Proposers whose guesses are known to be right or wrong, for method=custom_class.

A test writes the true continuations into `KnownText.continuations` first, by request_id.
"""

from __future__ import annotations

import random
from typing import ClassVar

from proposers.base import Proposer, draft_tokens_from_lists
from runner.engine.request import DraftTokens, Request
from runner.engine.scheduler import Schedule


class KnownText(Proposer):
    """Knows what each request will say; subclasses decide what to make of it."""

    continuations: ClassVar[dict[str, list[int]]] = {}  # request_id -> its whole output

    def propose(self, schedule: Schedule) -> DraftTokens:
        guesses = []
        for item in schedule.decoding:
            said = len(item.request.output_token_ids)
            truth = self.continuations.get(item.request.request_id, [])[said : said + item.max_draft_tokens]
            # Beyond a known end (eos) anything will do.
            truth = truth + [0] * (item.max_draft_tokens - len(truth))
            guesses.append(self.guess(truth, item.request))
        return draft_tokens_from_lists(guesses, self.context.device)

    def guess(self, truth: list[int], request: Request) -> list[int]:
        """The draft, given the true next tokens; as many or fewer."""
        raise NotImplementedError

    def wrong(self, token_id: int) -> int:
        return (token_id + 1) % self.context.vocab_size


class OracleProposer(KnownText):
    """Always right."""

    def guess(self, truth: list[int], request: Request) -> list[int]:
        return truth


class AdversarialProposer(KnownText):
    """Wrong in its first token, right in all others: only a verifier that looks past the first rejection gains."""

    def guess(self, truth: list[int], request: Request) -> list[int]:
        return [self.wrong(truth[0]), *truth[1:]] if truth else []


class HalfRightProposer(KnownText):
    """Right in the first half of K tokens, rounded down, then wrong once, then right."""

    def guess(self, truth: list[int], request: Request) -> list[int]:
        num_right = self.num_speculative_tokens // 2
        return [self.wrong(token) if place == num_right else token for place, token in enumerate(truth)]


class RandomProposer(KnownText):
    """Any tokens."""

    def guess(self, truth: list[int], request: Request) -> list[int]:
        generator = _generator(request)
        return [generator.randrange(self.context.vocab_size) for _ in truth]


class RaggedProposer(KnownText):
    """None to all of the tokens it may propose, each of them right with probability 0.8 where the truth is known."""

    def guess(self, truth: list[int], request: Request) -> list[int]:
        generator = _generator(request)
        kept = truth[: generator.randint(0, len(truth))]
        return [token if generator.random() < 0.8 else self.wrong(token) for token in kept]


def _generator(request: Request) -> random.Random:
    """The same guesses in every run, whatever the batch."""
    return random.Random(f"{request.request_id} {request.num_tokens}")
