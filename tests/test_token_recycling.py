"""Token recycling: the table is what the target last said, and drafts are the likeliest nodes of what it holds."""

from __future__ import annotations

import heapq
import math
from typing import Any

import pytest
import torch

from proposers.captured.recycled import CapturedRecycling
from proposers.lookup.candidate_table import CandidateTable
from proposers.token_recycling import TokenRecyclingProposer
from runner.engine.device_requests import DeviceRequests
from runner.engine.request import Request
from runner.engine.sampling_flags import SamplingFlags
from runner.engine.sampling_params import SamplingParams
from runner.engine.step_operations import fit_drafts
from tests.conftest import Engines, complete

CPU = torch.device("cpu")
VOCAB_SIZE = 23
PROMPTS = [{"prompt_token_ids": [5, 6, 7, 8, 9, 10, 11]}, {"prompt_token_ids": [3, 4]}]
PARAMS = [
    SamplingParams(max_tokens=24, temperature=0.0, ignore_eos=True),
    SamplingParams(max_tokens=24, temperature=0.8, seed=3, ignore_eos=True),
]
TREE = {"method": "token_recycling", "num_speculative_tokens": 6, "tree_depth": 3}
CHAIN = {"method": "token_recycling", "num_speculative_tokens": 3, "speculative_token_tree": None}


def taught() -> tuple[CandidateTable, torch.Tensor]:
    """A table that knows all tokens but the last, and the logits that it learned from."""
    table = CandidateTable(vocab_size=VOCAB_SIZE, device=CPU)
    logits = 2 * torch.randn(VOCAB_SIZE - 1, VOCAB_SIZE, generator=torch.Generator().manual_seed(1))
    table.learn(torch.arange(VOCAB_SIZE - 1), logits)
    return table, logits


def best_paths(logits: torch.Tensor, last: int, *, num_nodes: int, depth: int, width: int) -> list[tuple[int, ...]]:
    """The likeliest paths, from the likeliest on, by a heap over all of them."""
    found, waiting = list[tuple[int, ...]](), [(0.0, ())]
    known = logits.double().log_softmax(dim=-1)
    while waiting and len(found) <= num_nodes:
        score, path = heapq.heappop(waiting)
        found.append(path)
        token = path[-1] if path else last
        if len(path) < depth and token < len(known):
            top = known[token].topk(width)
            for log_prob, child in zip(top.values.tolist(), top.indices.tolist(), strict=True):
                heapq.heappush(waiting, (score - log_prob, (*path, child)))
    return found[1 : num_nodes + 1]


@pytest.mark.parametrize(("num_nodes", "depth"), [(1, 1), (6, 3), (20, 2), (40, 6)])
def test_a_tree_has_the_likeliest_nodes(num_nodes: int, depth: int) -> None:
    table, logits = taught()
    last = [4, VOCAB_SIZE - 1, 11]  # nothing is known of the one in the middle
    tree = table.trees(torch.tensor(last), num_nodes=num_nodes, depth=depth)
    for row, token in enumerate(last):
        paths = list[tuple[int, ...]]()
        for own, parent in zip(tree.token_ids[row].tolist(), tree.parents[row].tolist(), strict=True):
            if own >= 0:
                paths.append((*(paths[parent] if parent >= 0 else ()), own))
        assert paths == best_paths(logits, token, num_nodes=num_nodes, depth=depth, width=8)
        assert bool(paths) == (token != VOCAB_SIZE - 1)


def test_a_chain_follows_the_likeliest_token_until_nothing_is_known() -> None:
    table, logits = taught()
    chain, token = list[int](), 4
    for _ in range(5):
        token = int(logits[token].argmax())
        chain.append(token)
        if token == VOCAB_SIZE - 1:
            break
    found = table.trees(torch.tensor([4, VOCAB_SIZE - 1]), num_nodes=5, depth=5, width=1)
    assert found.token_ids.tolist() == [chain + [-1] * (5 - len(chain)), [-1] * 5]
    assert math.isinf(float(table.log_probs[VOCAB_SIZE - 1, 0]))


@pytest.mark.parametrize("method", [TREE, CHAIN], ids=["tree", "chain"])
def test_whole_steps_learn_and_draft_what_steps_in_parts_do(engines: Engines, method: dict[str, Any]) -> None:
    """Also from drafts that were rejected, for both requests of the batch."""
    tables, counts = list[torch.Tensor](), list[list[Any]]()
    for enforce_eager in (False, True):
        llm = engines(method, enforce_eager=enforce_eager, max_num_seqs=2)
        proposer = llm.engine.proposer
        assert isinstance(proposer, TokenRecyclingProposer)
        proposer.restart()
        _, metrics = complete(llm, PROMPTS, PARAMS)
        counts.append([(record.num_draft_tokens, record.num_accepted_tokens) for record in metrics.records])
        tables.append(proposer._table.token_ids[:-1].clone())
    assert counts[0] == counts[1] and all(sum(drafted) for drafted, _ in counts[0])
    assert torch.equal(*tables)
    said = {token for request in complete(llm, PROMPTS, PARAMS)[0] for token in request.output_token_ids}
    said |= {11, 4}  # the prompts' last ones
    assert (tables[1].sum(dim=1) > 0).sum() > len(said), "rejected drafts tell of tokens that nobody said"


def test_a_restart_forgets_all(engines: Engines) -> None:
    llm = engines(TREE)
    proposer = llm.engine.proposer
    assert isinstance(proposer, TokenRecyclingProposer)
    complete(llm, PROMPTS, PARAMS)
    assert not bool(proposer._table.log_probs.isinf().all())
    proposer.restart()
    assert bool(proposer._table.log_probs.isinf().all())


def test_earlier_requests_teach_later_ones(engines: Engines) -> None:
    """The second time the same request is drafted better."""
    llm = engines(TREE)
    llm.engine.proposer.restart()
    steps = [len(complete(llm, PROMPTS[:1], PARAMS[:1])[1].step_points) for _ in range(2)]
    assert steps[1] < steps[0]


@pytest.mark.parametrize("has_left", [True, False], ids=["who has left", "who was there in an earlier batch"])
def test_whole_steps_learn_nothing_of_a_place_without_a_request(has_left: bool) -> None:
    """Its drafts fitted, and what was computed of them, without any context, took the place of what was known."""
    table = CandidateTable(vocab_size=VOCAB_SIZE, device=CPU)
    requests = [
        Request(request_id=str(last), prompt_token_ids=[1] * 8, sampling_params=PARAMS[0], seed=0, block_table=[1, 2])
        for last in (10, 20)
    ]
    for request in requests:
        request.output_token_ids = [2, int(request.request_id)]
    flags = SamplingFlags.of(requests, ())
    on_device = DeviceRequests(
        capacity=2, max_model_len=32, block_size=16, vocab_size=VOCAB_SIZE, eos_token_ids=(), device=CPU
    )
    drafter = CapturedRecycling(2, table=table, tree_depth=None, capacity=2)
    on_device.load(requests, flags)
    on_device.fill_rows(3)
    drafter.start(requests)
    if has_left:
        on_device.remove([1])
    else:
        on_device.load(requests[:1], flags)
        drafter.start(requests[:1])
    batch = on_device.batch(2, flags, 32, 3)
    guesses = torch.tensor([[11, 12], [21, 22]])
    drafts, _ = fit_drafts(guesses, batch.last_token_ids[:, 1], batch.lengths, batch.step_limits)
    drafter.learn_logits(batch, drafts, torch.randn(6, VOCAB_SIZE, generator=torch.Generator().manual_seed(2)))
    known = [token for token in range(VOCAB_SIZE) if table.log_probs[token, 0] > -math.inf]
    assert known == [10, 11, 12]
