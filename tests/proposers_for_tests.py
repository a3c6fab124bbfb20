"""Proposers whose guesses are known to be right or wrong, for method=custom_class.

A test writes the true continuations into `KnownText.continuations` first, by request_id.
"""

from __future__ import annotations

import os
import random
from typing import Any, ClassVar

from proposers.base import Proposer, draft_tokens_from_lists
from proposers.trees.draft_tree import DraftTree, draft_tokens_from_trees
from runner.engine.request import DraftTokens, Request
from runner.engine.schedule import Schedule, ScheduledRequest


class KnownText(Proposer):
    """Knows what each request will say; subclasses decide what to make of it."""

    continuations: ClassVar[dict[str, list[int]]] = {}  # request_id -> its whole output

    def propose(self, schedule: Schedule) -> DraftTokens:
        guesses = [self.guess(self.truth(item), item.request) for item in schedule.decoding]
        return draft_tokens_from_lists(guesses, self.context.device)

    def truth(self, item: ScheduledRequest) -> list[int]:
        """The next tokens, as many as may be drafted."""
        said = len(item.request.output_token_ids)
        truth = self.continuations.get(item.request.request_id, [])[said : said + item.max_draft_tokens]
        # Beyond a known end (eos) anything will do.
        return truth + [0] * (item.max_draft_tokens - len(truth))

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


class KnownTree(KnownText):
    """Hides what it knows in a tree; subclasses decide where."""

    def propose(self, schedule: Schedule) -> DraftTokens:
        trees = [self.tree(self.truth(item), item.request) for item in schedule.decoding]
        return draft_tokens_from_trees(trees, self.context.device)

    def tree(self, truth: list[int], request: Request) -> DraftTree:
        """The draft, of at most as many nodes as there are true next tokens."""
        raise NotImplementedError


class RandomTreeProposer(KnownTree):
    """Trees of any shape, none and chains among them, in depth-first order or not, that hold some of the truth."""

    def tree(self, truth: list[int], request: Request) -> DraftTree:
        generator = _generator(request)
        token_ids: list[int] = []
        parents: list[int] = []
        on_truth = [-1]  # the nodes of the path that is right so far
        for node in range(generator.randint(0, len(truth))):
            is_right = generator.random() < 0.5
            parent = on_truth[-1] if is_right else generator.choice([-1, *range(node)])
            token_id = truth[len(on_truth) - 1] if is_right else generator.randrange(self.context.vocab_size)
            siblings = [token_ids[other] for other in range(node) if parents[other] == parent]
            while token_id in siblings:
                token_id = self.wrong(token_id)
            if parent == on_truth[-1] and token_id == truth[len(on_truth) - 1]:
                on_truth.append(node)
            token_ids.append(token_id)
            parents.append(parent)
        tree = DraftTree(token_ids=token_ids, parents=parents)
        return tree.depth_first() if generator.random() < 0.5 else tree


class BushProposer(KnownTree):
    """At each depth the right token, last of three siblings of which the first has a child: K // 4 nodes are right."""

    def tree(self, truth: list[int], request: Request) -> DraftTree:
        token_ids: list[int] = []
        parents: list[int] = []
        on_truth = -1
        for right in truth[: len(truth) // 4]:
            first, second = self.wrong(right), self.wrong(self.wrong(right))
            first_node = len(token_ids)
            token_ids += [first, right, second, right]
            parents += [on_truth, first_node, on_truth, on_truth]
            on_truth = first_node + 3
        return DraftTree(token_ids=token_ids, parents=parents)


def _generator(request: Request) -> random.Random:
    """The same guesses in every run, whatever the batch."""
    return random.Random(f"{request.request_id} {request.num_tokens}")


class FailsElsewhereProposer(Proposer):
    """Raises in every process but one."""

    def __init__(self, *, process: int, **keys: Any) -> None:
        super().__init__(**keys)
        self.process = process

    def propose(self, schedule: Schedule) -> DraftTokens:
        if os.getpid() != self.process:
            raise RuntimeError("this process must draft nothing")
        return draft_tokens_from_lists([[] for _ in schedule.decoding], self.context.device)


def set_corpus(proposer: Any, corpus: list[list[int]]) -> None:
    """What suffix decoding, or the half of a proposer that it is, knows from its next restart on."""
    suffix = getattr(proposer, "suffix", proposer)
    suffix._corpus, suffix._is_new = corpus, False
