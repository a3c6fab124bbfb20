"""Trees of drawn candidates, drafted by the real tree builders and judged by the real rules: the tokens' distribution.

tests/test_tree_rules.py enumerates the rules over independent draws. Whether the builders draw independently, only
their own draws tell.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from proposers.base import Proposer, ProposerContext
from proposers.drafting.level_by_level import LevelByLevelProposer, TreeNode
from proposers.drafting.ranked_trees import RankedTreeProposer, RankedTrees
from proposers.trees.static import Choices
from runner.config.drafter_methods import MedusaMethod
from runner.config.method import RejectionSampleMethod
from runner.engine.request import DraftTokens, Request
from runner.engine.sampling import SamplingRows
from runner.engine.sampling_params import SamplingParams
from tests.decoding_steps import schedule_of
from tests.sampling_for_tests import ALPHA, p_value
from verifier.rejection_sampler import RejectionSampler

VOCAB_SIZE, NUM_REQUESTS, NUM_TOKENS = 3, 8_000, 3
TWO_CHAINS: Choices = ((0,), (0, 0), (1,), (1, 0))
BROOM: Choices = ((0,), (0, 0), (0, 1), (1,))  # one node of each depth has children
generator = torch.Generator().manual_seed(5)
# The next token's logits given the last: sharp ones that disagree, so that draws which hang together show at once.
TARGET, DRAFT = (2 * torch.randn(VOCAB_SIZE, VOCAB_SIZE, generator=generator) for _ in range(2))


def last_tokens(requests: Sequence[Request]) -> list[int]:
    return [request.output_token_ids[-1] if request.output_token_ids else 0 for request in requests]


class LevelDrafter(LevelByLevelProposer):
    """Knows a Markov chain."""

    def first_logits(self, requests: Sequence[Request]) -> Tensor:
        return DRAFT[last_tokens(requests)]

    def level_logits(
        self, requests: Sequence[Request], owners: Sequence[int], nodes: Sequence[TreeNode], token_ids: Tensor
    ) -> Tensor:
        return DRAFT[token_ids]

    def next_logits(self, requests: Sequence[Request], step: int, token_ids: Tensor, row_idx: Tensor | None) -> Tensor:
        return DRAFT[token_ids]


class RankedDrafter(RankedTreeProposer):
    """Guesses the second token without the first."""

    def __init__(self, choices: Choices, **common: Any) -> None:
        super().__init__(**common)
        self.trees = RankedTrees(self, choices, max_depth=2)

    def first_logits(self, requests: Sequence[Request]) -> Tensor:
        return DRAFT[last_tokens(requests)]

    def next_logits(self, requests: Sequence[Request], step: int, token_ids: Tensor, row_idx: Tensor | None) -> Tensor:
        return DRAFT[1].expand(len(requests), -1)


def make_drafter(kind: str, choices: Choices, sampler: RejectionSampler) -> Proposer:
    context = ProposerContext(
        vocab_size=VOCAB_SIZE,
        max_model_len=16,
        max_num_seqs=NUM_REQUESTS,
        max_num_batched_tokens=1024,
        eos_token_ids=(),
        block_size=16,
        device=torch.device("cpu"),
        dtype=torch.float32,
        batch_invariant=True,
        needs_draft_probs=sampler.rule.reads_draft_probs,
        keys_by_draft_step=sampler.rule.keys_by_draft_step,
    )
    common: dict[str, Any] = {
        "num_speculative_tokens": len(choices),
        "context": context,
        "draft_sample_method": "probabilistic",
    }
    if kind == "ranked":
        return RankedDrafter(choices, **common)
    return LevelDrafter(**common, speculative_token_tree=choices, tree_depth=2, tree_top_k=2)


def make_requests(params: Sequence[SamplingParams]) -> list[Request]:
    return [
        Request(request_id=str(seed), prompt_token_ids=[0], sampling_params=own, seed=seed)
        for seed, own in enumerate(params)
    ]


def take_step(sampler: RejectionSampler, drafts: DraftTokens, requests: Sequence[Request]) -> None:
    shape = drafts.shapes[0]
    assert all(other == shape for other in drafts.shapes), "the tree is a static one"
    last = torch.tensor(last_tokens(requests)).unsqueeze(1)
    contexts = torch.cat((last, drafts.token_ids.view(len(requests), -1)), dim=1)
    lengths, depths = torch.tensor([request.num_tokens for request in requests]), torch.tensor((0, *shape.depths))
    rows = SamplingRows(
        vocab_size=VOCAB_SIZE,
        is_greedy=(False,) * contexts.numel(),
        seeds=torch.tensor([request.seed for request in requests]).repeat_interleave(len(depths)),
        positions=(lengths.unsqueeze(1) + depths).flatten(),
        random_row_idx=None,
    )
    token_ids = sampler(TARGET[contexts.flatten()], drafts, rows).token_ids.tolist()
    for request, tokens in zip(requests, token_ids, strict=True):
        request.output_token_ids += [token for token in tokens if token >= 0]


@pytest.mark.parametrize("choices", [TWO_CHAINS, BROOM], ids=["two_chains", "broom"])
@pytest.mark.parametrize("rule", ["strict", "probabilistic", "block"])
@pytest.mark.parametrize("kind", ["level_by_level", "ranked"])
def test_trees_of_drawn_candidates_keep_the_distribution(kind: str, rule: str, choices: Choices) -> None:
    """Over several steps."""
    sampler = RejectionSampler(rejection_sample_method=rule)
    drafter, requests = make_drafter(kind, choices, sampler), make_requests([SamplingParams()] * NUM_REQUESTS)
    while going := [request for request in requests if len(request.output_token_ids) < NUM_TOKENS]:
        take_step(sampler, drafter.propose(schedule_of(*going, max_draft_tokens=len(choices))), going)
    texts = torch.tensor([request.output_token_ids[:NUM_TOKENS] for request in requests])
    weights = VOCAB_SIZE ** torch.arange(NUM_TOKENS - 1, -1, -1)
    counts = torch.bincount((texts * weights).sum(dim=1), minlength=VOCAB_SIZE**NUM_TOKENS)
    p = TARGET.double().softmax(-1)
    expected = p[0]
    for _ in range(NUM_TOKENS - 1):
        expected = (expected.view(-1, VOCAB_SIZE, 1) * p).flatten()
    value = p_value(counts, expected * NUM_REQUESTS)
    assert value > ALPHA, value


@pytest.mark.parametrize(
    ("rule", "choices", "is_drawn"),
    [("block", TWO_CHAINS, False), ("block", BROOM, True), ("probabilistic", TWO_CHAINS, True)],
)
def test_block_gets_the_likeliest_candidates_where_one_list_serves_two_nodes(
    rule: RejectionSampleMethod, choices: Choices, is_drawn: bool
) -> None:
    drafter = make_drafter("ranked", choices, RejectionSampler(rejection_sample_method=rule))
    drafts = drafter.propose(schedule_of(*make_requests([SamplingParams()] * 3)))
    assert (drafts.probs is not None) == is_drawn
    config = MedusaMethod(
        model="h", num_speculative_tokens=4, rejection_sample_method=rule, speculative_token_tree=choices
    )
    assert any("its likeliest are drafted" in note for note in config.notes()) != is_drawn


def test_a_greedy_requests_tree_does_not_depend_on_its_neighbours() -> None:
    """The ranks of its children are the choices', also where a neighbour's drawn candidates are taken in order."""
    choices: Choices = ((0,), (2,), (2, 1))
    drafter = make_drafter("level_by_level", choices, RejectionSampler(rejection_sample_method="probabilistic"))
    greedy, drawn = SamplingParams(temperature=0.0), SamplingParams()
    alone = drafter.propose(schedule_of(*make_requests([greedy]), max_draft_tokens=3)).token_ids
    assert torch.equal(
        drafter.propose(schedule_of(*make_requests([greedy, drawn]), max_draft_tokens=3)).token_ids[:3], alone
    )
