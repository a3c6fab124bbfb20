"""The rules on draft trees: the exact distribution of a step's tokens, definitions node by node, several steps.

The enumeration runs the verifier's own walk in float64 over all candidates of toy vocabularies: the measure of each
acceptance is found by bisection of its uniform variate, and the distribution of the token behind is the one it would
draw from.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from kernels.reference.philox import Stream, gumbel, uniforms
from runner.engine.draft_trees import TreeShape, tree_shape
from runner.engine.request import DraftTokens, VerifyOutput
from runner.engine.sampling import SamplingRows, process_logits, sample_tokens
from runner.engine.sampling_params import SamplingParams
from tests.no_readback import NoReadback
from tests.sampling_for_tests import ALPHA, assert_follows, markov_case, p_value, sampled_rows, sequence_index
from tests.test_rejection_rules import MIXED_PARAMS, make_requests
from verifier import traversal as traversal_module
from verifier import tree as tree_module
from verifier.draft_batch import DraftBatch
from verifier.rejection_sampler import REJECTION_SAMPLE_METHODS, RejectionSampler
from verifier.traversal import traverse
from verifier.tree import reject_recursively
from verifier.tree_batch import TreeBatch

RULES = [method for method in REJECTION_SAMPLE_METHODS if method != "standard"]  # an alias
SHAPES = {
    "two siblings": [-1, -1],
    "three siblings": [-1, -1, -1],
    "a branch below a chain": [-1, 0, 0],
    "two chains": [-1, 0, -1, 2],
    "two under two": [-1, 0, 0, -1, 3],
    "not depth first": [-1, -1, 1, 0, 1],
    "three deep": [-1, 0, 1, 0, -1],
}


SYNTHETIC_RATES = [0.9, 0.6, 0.75, 0.5, *([0.7] * 12)]  # of each depth


def make_sampler(method: str) -> RejectionSampler:
    rates = SYNTHETIC_RATES if method == "synthetic" else None
    return RejectionSampler(rejection_sample_method=method, synthetic_conditional_rates=rates)


# --- exact distributions --------------------------------------------------------------------------------------------


def random_probs(vocab_size: int, generator: torch.Generator) -> Tensor:
    """Peaked and flat ones, with ties and zeros."""
    weights = (2 * torch.randn(vocab_size, dtype=torch.float64, generator=generator)).exp()
    kind = torch.randint(0, 6, (vocab_size,), generator=generator)
    weights = torch.where(kind == 0, 0.0, torch.where(kind == 1, 1.0, weights))
    weights[0] += float(weights.sum() == 0)
    return weights / weights.sum()


NUM_HALVINGS = 40  # of a variate's range: to 1e-12, a hundredth of what the distributions may be off


@dataclass
class Distributions:
    """A distribution of the next token for every text; made when it is asked for."""

    vocab_size: int
    generator: torch.Generator
    num_candidates: int = 1  # as many tokens have mass at least, so that so many can be drawn without replacement

    def __post_init__(self) -> None:
        self._known: dict[tuple[int, ...], Tensor] = {}

    def __call__(self, text: tuple[int, ...]) -> Tensor:
        if text not in self._known:
            probs = random_probs(self.vocab_size, self.generator)
            while int((probs > 0).sum()) < self.num_candidates:
                probs = random_probs(self.vocab_size, self.generator)
            self._known[text] = probs
        return self._known[text]


Drawn = tuple[float, list[int], list[Tensor]]  # probability of a set of candidates, its tokens, their distributions


def candidate_sets(shape: TreeShape, q: Distributions) -> Iterator[Drawn]:
    """(probability, token of each node, its distribution given earlier siblings) of all draws without replacement."""

    def texts(tokens: dict[int, int], node: int) -> tuple[int, ...]:
        return tuple(tokens[n] for n in shape.paths[node]) if node >= 0 else ()

    def draw(node: int, tokens: dict[int, int], draft_probs: list[Tensor], chance: float) -> Iterator[Drawn]:
        if node == len(shape.parents):
            yield chance, [tokens[n] for n in range(node)], draft_probs
            return
        parent = shape.parents[node]
        probs = q(texts(tokens, parent)).clone()
        for sibling in shape.children[parent + 1]:
            if sibling < node:
                probs[tokens[sibling]] = 0.0
        probs = probs / probs.sum()
        for token in range(q.vocab_size):
            if probs[token] > 0:
                yield from draw(node + 1, tokens | {node: token}, [*draft_probs, probs], chance * float(probs[token]))

    yield from draw(0, {}, [], 1.0)


def committed_distribution(
    shape: TreeShape, p: Distributions, drawn: Sequence[Drawn], rule: str
) -> tuple[Tensor, float]:
    """(distribution of the next depth + 1 tokens, mean accepted drafts) of one step over all these candidates."""
    order = order_of_tests(shape, rule)
    num_nodes, vocab_size = len(shape.parents), p.vocab_size
    ends = [-1, *range(num_nodes)]
    # Which variate of its position a node has: by its rank under its parent, or by its place at its depth.
    rank = {node: own.index(node) for own in shape.children for node in own}
    if rule == "block":
        rank = {node: shape.depths[:node].count(depth) for node, depth in enumerate(shape.depths)}
    # A request for every set of candidates and every end; its variates lead to the end and no further.
    pairs = [(one, end) for one in drawn for end in ends]
    texts = [[tuple(one[1][n] for n in shape.paths[node]) if node >= 0 else () for node in ends] for one in drawn]
    drafts = DraftTokens(
        token_ids=torch.tensor([token for one, _ in pairs for token in one[1]]),
        cu_num_draft_tokens=list(range(0, num_nodes * len(pairs) + 1, num_nodes)),
        probs=torch.stack([probs for one, _ in pairs for probs in one[2]]),
        parent_indices=list(shape.parents) * len(pairs),
    )
    logits = torch.stack([p(text).log() for own in texts for _ in ends for text in own])
    # Positions count depths from 0, seeds count the requests.
    seeds = torch.arange(len(pairs)).repeat_interleave(num_nodes + 1)
    rows = sampled_rows(seeds, torch.tensor([0, *shape.depths]).repeat(len(pairs)), vocab_size)
    batch = TreeBatch.build(drafts, rows)
    u = torch.ones(len(pairs), shape.depth + 1, max(rank.values()) + 1, dtype=torch.float64)
    for index, (_, end) in enumerate(pairs):
        for node, stays in order(end):
            u[index, shape.depths[node] - 1, rank[node]] = 0.0 if stays else 1.0
    last_rows, next_probs = walk(logits, batch, rows, u, rule)

    # The measure of {u: the end's node stays}, given that the walk comes to it: all ends of all candidates at once.
    chosen = torch.tensor([i for i, (_, end) in enumerate(pairs) if end >= 0])
    nodes = [end for _, end in pairs if end >= 0]
    places = torch.tensor([[shape.depths[node] - 1 for node in nodes], [rank[node] for node in nodes]])
    own_drafts = (batch.first_draft_idx[chosen] + torch.tensor(nodes)).unsqueeze(1)
    low, high = torch.zeros(len(chosen), dtype=torch.float64), torch.ones(len(chosen), dtype=torch.float64)
    for _ in range(NUM_HALVINGS):
        middle = (low + high) / 2
        u[chosen, places[0], places[1]] = middle
        stays = (batch.paths[walk(logits, batch, rows, u, rule)[0][chosen]] == own_drafts).any(dim=1)
        low, high = torch.where(stays, middle, low), torch.where(stays, high, middle)
    measures = high.view(len(drawn), num_nodes).tolist()
    depth = shape.depth
    probs = torch.zeros((vocab_size,) * (depth + 1), dtype=torch.float64)
    mean = 0.0
    for index, (chance, tokens, _) in enumerate(drawn):
        for place, end in enumerate(ends):
            weight = chance
            for node, stays in order(end):
                weight *= measures[index][node] if stays else 1 - measures[index][node]
            if weight <= 2.0**-NUM_HALVINGS:  # what is left of a measure that is 0
                continue
            request = index * len(ends) + place
            assert int(last_rows[request]) == int(batch.first_row_idx[request]) + 1 + end
            path = shape.paths[end] if end >= 0 else ()
            mean += weight * len(path)
            said = tuple(tokens[node] for node in path)
            following = next_probs[request] / next_probs[request].sum()
            for token in range(vocab_size):
                probs[(*said, token)] += weight * following[token] * tail(p, (*said, token), depth + 1)
    return probs, mean


def order_of_tests(shape: TreeShape, rule: str) -> Callable[[int], list[tuple[int, bool]]]:
    """For each node at which the walk may end, or -1: the nodes that are tested then, and whether they stay."""

    def recursive(end: int) -> list[tuple[int, bool]]:
        tests = []
        for node in shape.paths[end] if end >= 0 else ():
            siblings = shape.children[shape.parents[node] + 1]
            tests += [(sibling, sibling == node) for sibling in siblings[: siblings.index(node) + 1]]
        return tests + [(child, False) for child in shape.children[end + 1]]

    def below(node: int) -> list[int]:  # and the node itself, children first
        return [inner for child in shape.children[node + 1] for inner in below(child)] + ([node] if node >= 0 else [])

    def from_the_leaves(end: int) -> list[tuple[int, bool]]:
        nodes = below(-1)
        return [(node, node == end) for node in nodes[: nodes.index(end) + 1 if end >= 0 else None]]

    return from_the_leaves if rule == "block" else recursive


def tail(p: Distributions, text: tuple[int, ...], length: int) -> Tensor:
    """The target's distribution of what follows the text up to a length, [vocab, ...]; 1 when nothing does."""
    if len(text) == length:
        return torch.ones((), dtype=torch.float64)
    probs = p(text)
    return torch.stack([probs[token] * tail(p, (*text, token), length) for token in range(p.vocab_size)])


def walk(logits: Tensor, batch: TreeBatch, rows: SamplingRows, u: Tensor, rule: str) -> tuple[Tensor, Tensor]:
    """(last row, distribution of the token behind it) of every request, with u[request, depth, rank] for variates."""
    draft_probs = []

    def given_uniforms(seeds: Tensor, positions: Tensor, *_: object, stream: int, num_entries: int) -> Tensor:
        assert stream == Stream.ACCEPT
        return u[seeds, positions][:, :num_entries]

    def keep_probs(logits: Tensor, *_: object) -> Tensor:
        draft_probs.append(logits.exp())
        return torch.zeros(len(logits), dtype=torch.int64)

    with pytest.MonkeyPatch.context() as patch:
        module = traversal_module if rule == "block" else tree_module
        patch.setattr(module, "uniforms", given_uniforms)
        patch.setattr(module, "sample_last", keep_probs)
        last, _ = (traverse if rule == "block" else reject_recursively)(logits, batch, rows)
    return last, draft_probs[0]


CASES = [(shape, 3) for shape in SHAPES] + [("two siblings", 4), ("three siblings", 4), ("two chains", 2)]


@pytest.mark.parametrize(("shape_name", "vocab_size"), CASES)
def test_candidates_drawn_without_replacement_leave_the_targets_distribution(shape_name: str, vocab_size: int) -> None:
    """Under either rule, and block accepts at least as many nodes as probabilistic."""
    shape = tree_shape(SHAPES[shape_name])
    generator = torch.Generator().manual_seed(vocab_size)
    accepted, gains = [], []
    for _ in range(2):
        p = Distributions(vocab_size, generator)
        drawn = list(candidate_sets(shape, Distributions(vocab_size, generator, max(map(len, shape.children)))))
        assert sum(chance for chance, _, _ in drawn) == pytest.approx(1, abs=1e-12)
        means = {}
        for rule in ("probabilistic", "block"):
            probs, means[rule] = committed_distribution(shape, p, drawn, rule)
            assert float((probs - tail(p, (), shape.depth + 1)).abs().max()) < 1e-10, rule
        accepted.append(min(means.values()))
        gains.append(means["block"] - means["probabilistic"])
    assert max(accepted) > 0.3, "where nothing is accepted there is little to get wrong"
    assert min(gains) > -1e-9
    assert (max(gains) > 1e-3) == (shape.depth > 1), "with one draft a path the two are one rule"


@pytest.mark.parametrize("rule", ["probabilistic", "block"])
@pytest.mark.parametrize(
    "mistake", ["distributions not renormalised", "pruned after they were drawn", "distributions swapped"]
)
def test_the_enumeration_finds_candidates_of_the_wrong_kind(mistake: str, rule: str) -> None:
    """Negative controls: what the rule may not be given shows beyond any rounding."""
    generator = torch.Generator().manual_seed(1)
    errors = []
    for _ in range(4):
        p, q = Distributions(3, generator, 3), Distributions(3, generator, 3)
        shape = tree_shape([-1, -1])
        drawn = list(candidate_sets(shape, q))
        if mistake == "distributions not renormalised":
            drawn = [(chance, tokens, [draft_probs[0], draft_probs[0]]) for chance, tokens, draft_probs in drawn]
        elif mistake == "distributions swapped":
            drawn = [(chance, tokens[::-1], draft_probs) for chance, tokens, draft_probs in drawn]
        else:  # the one that the drafter finds likelier is kept
            shape = tree_shape([-1])
            best = [int(q(())[tokens].argmax()) for _, tokens, _ in drawn]
            drawn = [
                (chance, [tokens[k]], [draft_probs[0]])
                for (chance, tokens, draft_probs), k in zip(drawn, best, strict=True)
            ]
        probs, _ = committed_distribution(shape, p, drawn, rule)
        errors.append(float((probs - tail(p, (), shape.depth + 1)).abs().max()))
    assert max(errors) > 1e-2


def test_more_siblings_accept_more() -> None:
    """The second and third candidate catch what the first one misses."""
    generator = torch.Generator().manual_seed(5)
    p, q = Distributions(4, generator, 4), Distributions(4, generator, 4)
    shapes = [tree_shape([-1] * count) for count in (1, 2, 3, 4)]
    means = [committed_distribution(shape, p, list(candidate_sets(shape, q)), "probabilistic")[1] for shape in shapes]
    assert means[0] < means[1] < means[2] < means[3] == pytest.approx(1, abs=1e-9)


# --- definitions ----------------------------------------------------------------------------------------------------


def random_shape(generator: torch.Generator, max_nodes: int) -> list[int]:
    num_nodes = int(torch.randint(0, max_nodes + 1, (), generator=generator))
    return [int(torch.randint(-1, node, (), generator=generator)) if node else -1 for node in range(num_nodes)]


@dataclass
class Case:
    rows: SamplingRows
    logits: Tensor
    drafts: DraftTokens

    def verify(self, method: str) -> VerifyOutput:
        return make_sampler(method)(self.logits, self.drafts, self.rows)


def tree_rows(params: Sequence[SamplingParams], drafts: DraftTokens, vocab_size: int) -> SamplingRows:
    requests, shapes = make_requests(params), drafts.shapes
    deepest = max(drafts.depths)
    paths = [
        [int(drafts.token_ids[start + node]) for node in path]
        for start, shape in zip(drafts.cu_num_draft_tokens, shapes, strict=False)
        for path in ((), *shape.paths)
    ]
    return SamplingRows.build(
        requests,
        [b for b, shape in enumerate(shapes) for _ in range(len(shape.parents) + 1)],
        [len(path) for path in paths],
        torch.tensor([[*path, *[-1] * (deepest - len(path))] for path in paths], dtype=torch.int64),
        vocab_size=vocab_size,
        eos_token_ids=(0,),
        device="cpu",
        path_idx=list(range(len(paths))),
    )


def random_trees(
    num_requests: int, vocab_size: int, seed: int, *, has_probs: bool, parents: Sequence[Sequence[int]] | None = None
) -> Case:
    """Mixed requests; siblings distinct, drawn from distributions near the target's, with the right probs."""
    generator = torch.Generator().manual_seed(seed)
    own_parents = parents or [random_shape(generator, 8) for _ in range(num_requests)]
    shapes = [tree_shape(own) for own in own_parents]
    num_drafts = sum(len(shape.parents) for shape in shapes)
    logits = torch.randn(num_drafts + num_requests, vocab_size, generator=generator) * 2.5
    token_ids: list[int] = []
    draft_probs: list[Tensor] = []
    first_row = 0
    for shape in shapes:
        first = len(token_ids)
        for node, parent in enumerate(shape.parents):
            noise = torch.randn(vocab_size, generator=generator)
            weights = (logits[first_row + 1 + parent] + noise).softmax(-1)
            for sibling in shape.children[parent + 1]:
                if sibling < node:
                    weights[token_ids[first + sibling]] = 0.0
            draft_probs.append(weights / weights.sum())
            token_ids.append(int(torch.multinomial(draft_probs[-1], 1, generator=generator)))
        first_row += len(shape.parents) + 1
    drafts = DraftTokens(
        token_ids=torch.tensor(token_ids, dtype=torch.int64),
        cu_num_draft_tokens=[0, *itertools.accumulate(len(shape.parents) for shape in shapes)],
        probs=torch.stack(draft_probs) if has_probs else None,
        parent_indices=[parent for shape in shapes for parent in shape.parents],
    )
    params = [MIXED_PARAMS[b % len(MIXED_PARAMS)] for b in range(num_requests)]
    return Case(rows=tree_rows(params, drafts, vocab_size), logits=logits, drafts=drafts)


def naive_walk(case: Case, request: int, method: str, processed: Tensor) -> tuple[list[int], int]:
    """(accepted nodes, the token behind them) by Python's own control flow and noise looked up, node by node."""
    shape = case.drafts.shapes[request]
    first, first_row = case.drafts.cu_num_draft_tokens[request], case.drafts.first_logits_rows[request]
    tokens = case.drafts.token_ids[first : first + len(shape.parents)].tolist()
    seed, is_greedy = case.rows.seeds[first_row : first_row + 1], case.rows.is_greedy[first_row]

    def draw(drawn_logits: Tensor, position: Tensor, stream: Stream) -> int:
        noise = 0.0 if is_greedy else gumbel(seed, position, stream, vocab_size=len(drawn_logits))[0]
        return int((drawn_logits + noise).argmax())

    def at(node: int) -> tuple[Tensor, Tensor]:
        row = first_row + 1 + node
        return processed[row], case.rows.positions[row : row + 1]

    if method == "typical" and not is_greedy:
        alive = {-1}
        for node, parent in enumerate(shape.parents):
            p = at(parent)[0].softmax(-1)
            bound = min(0.09, 0.3 * float(torch.exp(-torch.special.entr(p.double()).sum())))
            if parent in alive and float(p[tokens[node]]) > bound:
                alive.add(node)
        best = max(alive, key=lambda node: (0 if node < 0 else shape.depths[node], -node))
        path = list(shape.paths[best]) if best >= 0 else []
        return path, draw(*at(best), Stream.TARGET)
    if method == "block" and not is_greedy and case.drafts.probs is not None:
        step = case.rows.positions[first_row : first_row + 1]

        def visit(node: int, chance: float, probs: Tensor) -> tuple[int, Tensor, bool] | None:
            is_reduced = False
            for child in shape.children[node + 1]:
                r = probs / probs.sum() if is_reduced else probs
                q = case.drafts.probs[first + child]
                below = min(chance * float(r[tokens[child]]) / float(q[tokens[child]]), 1.0)
                if (found := visit(child, below, at(child)[0].softmax(-1))) is not None:
                    return found
                excess = (r * chance - q).clamp(min=0)
                mass = float(excess.double().sum())
                probs, is_reduced = excess if mass > 0 else r, True  # no mass: the chance is 0, nothing reads probs
                chance = mass / (mass + 1 - chance) if chance < 1 else 1.0
            if node < 0:
                return node, probs, is_reduced
            place = shape.depths[:node].count(shape.depths[node])
            position = at(shape.parents[node])[1]
            u = float(uniforms(seed, position, Stream.ACCEPT, step, num_entries=place + 1)[0, place])
            return (node, probs, is_reduced) if u < chance else None

        found = visit(-1, 1.0, at(-1)[0].softmax(-1))
        assert found is not None
        end, probs, is_reduced = found
        path = list(shape.paths[end]) if end >= 0 else []
        logits, position = at(end)
        return path, draw(
            probs.log() if is_reduced else logits, position, Stream.RESIDUAL if is_reduced else Stream.TARGET
        )
    node, path = -1, []
    while True:
        logits, position = at(node)
        p = logits.softmax(-1)
        children = shape.children[node + 1]
        u = uniforms(seed, position, Stream.ACCEPT, num_entries=max(1, len(children)))[0].tolist()
        probs, taken, is_recursive = p, None, False
        if method == "synthetic":
            taken = children[0] if children and u[0] < SYNTHETIC_RATES[len(path)] else None
        elif method != "probabilistic" or is_greedy or case.drafts.probs is None:
            taken = next((child for child in children if tokens[child] == draw(logits, position, Stream.TARGET)), None)
        else:
            is_recursive = True
            for rank, child in enumerate(children):
                q = case.drafts.probs[first + child]
                r = probs if rank == 0 else probs / probs.sum()
                if u[rank] * float(q[tokens[child]]) < float(r[tokens[child]]):
                    taken = child
                    break
                probs = (r - q).clamp(min=0)
        if taken is None:
            if is_recursive and children:
                return path, draw(probs.log(), position, Stream.RESIDUAL)
            return path, draw(logits, position, Stream.TARGET)
        node = taken
        path.append(node)


@pytest.mark.parametrize("has_probs", [False, True])
@pytest.mark.parametrize("method", RULES)
def test_a_rule_is_its_definition_node_by_node(monkeypatch: pytest.MonkeyPatch, method: str, has_probs: bool) -> None:
    monkeypatch.setattr(traversal_module, "MOST_ENTRIES", 40 * 23)  # several batches of distributions at every depth
    case = random_trees(150, 23, seed=3, has_probs=has_probs)
    processed = process_logits(case.logits, case.rows)
    output = case.verify(method)
    assert output.path is not None
    depths = set()
    for request, start in enumerate(case.drafts.cu_num_draft_tokens[:-1]):
        path, token_id = naive_walk(case, request, method, processed)
        tokens = [*(int(case.drafts.token_ids[start + node]) for node in path), token_id]
        assert output.token_ids[request].tolist() == tokens + [-1] * (output.token_ids.shape[1] - len(tokens))
        assert output.path[request].tolist() == path + [-1] * (output.path.shape[1] - len(path))
        assert int(output.num_accepted_tokens[request]) == len(path)
        depths.add(len(path))
    assert {0, 1, 2} <= depths


@pytest.mark.parametrize("has_probs", [False, True])
def test_strict_and_candidates_without_probs_say_what_the_target_says(has_probs: bool) -> None:
    """Plain decoding's very tokens: each one is the draw, or the argmax, of the row before it."""
    case = random_trees(200, 11, seed=4, has_probs=has_probs)
    targets = sample_tokens(process_logits(case.logits, case.rows), case.rows)
    for method in ("strict", "probabilistic", "block")[: 1 if has_probs else 3]:
        output = case.verify(method)
        assert output.path is not None
        for request, first_row in enumerate(case.drafts.first_logits_rows):
            rows = [first_row, *(first_row + 1 + node for node in output.path[request].tolist() if node >= 0)]
            said = [token for token in output.token_ids[request].tolist() if token >= 0]
            assert said == targets[rows].tolist()


@pytest.mark.parametrize(
    ("method", "has_probs"),
    [(method, True) for method in RULES] + [(method, False) for method in ("strict", "typical", "synthetic")],
)
def test_a_tree_that_is_a_chain_is_judged_as_one_bit_for_bit(method: str, has_probs: bool) -> None:
    """Without probs, probabilistic and block have candidates that nobody drew follow the target's own tokens."""
    chains = [list(range(-1, count - 1)) for count in itertools.islice(itertools.cycle([3, 0, 1, 5, 2]), 90)]
    case = random_trees(90, 23, seed=5, has_probs=has_probs, parents=chains)
    processed, rule = process_logits(case.logits, case.rows), make_sampler(method).rule
    assert not case.drafts.has_branches
    num_accepted, token_ids = rule.verify(processed, DraftBatch.build(case.drafts, case.rows), case.rows)
    last, tree_token_ids = rule.verify_tree(processed, TreeBatch.build(case.drafts, case.rows), case.rows)
    assert torch.equal(last - torch.tensor(case.drafts.first_logits_rows), num_accepted)
    assert torch.equal(tree_token_ids, token_ids)
    assert len(set(num_accepted.tolist())) >= 4


@pytest.mark.parametrize("has_probs", [False, True])
@pytest.mark.parametrize("method", RULES)
def test_a_requests_result_does_not_depend_on_its_neighbours(method: str, has_probs: bool) -> None:
    """Alone a chain takes the way of chains, beside trees that of trees."""
    case = random_trees(40, 17, seed=6, has_probs=has_probs)
    together = case.verify(method)
    shapes, cu, first_rows = case.drafts.shapes, case.drafts.cu_num_draft_tokens, case.drafts.first_logits_rows
    params = [MIXED_PARAMS[b % len(MIXED_PARAMS)] for b in range(40)]
    for b, shape in enumerate(shapes):
        count = len(shape.parents)
        drafts = replace(
            case.drafts,
            token_ids=case.drafts.token_ids[cu[b] : cu[b + 1]],
            cu_num_draft_tokens=[0, count],
            probs=None if case.drafts.probs is None else case.drafts.probs[cu[b] : cu[b + 1]],
            parent_indices=list(shape.parents),
        )
        everyone = tree_rows(params, case.drafts, 17)
        rows = replace(
            everyone,
            is_greedy=everyone.is_greedy[first_rows[b] : first_rows[b] + count + 1],
            seeds=everyone.seeds[first_rows[b] : first_rows[b] + count + 1],
            positions=everyone.positions[first_rows[b] : first_rows[b] + count + 1],
            random_row_idx=torch.tensor([], dtype=torch.int64) if everyone.is_greedy[first_rows[b]] else None,
            **dict.fromkeys(("bad_words", "logit_bias", "forbidden", "penalties", "temperatures", "min_p"), None),
            **dict.fromkeys(("top_k", "top_p"), None),
        )
        processed = process_logits(case.logits, everyone)[first_rows[b] : first_rows[b] + count + 1]
        alone = make_sampler(method)(processed, drafts, rows)
        width = alone.token_ids.shape[1]
        assert together.token_ids[b].tolist()[:width] == alone.token_ids[0].tolist()


@given(st.lists(st.lists(st.integers(0, 3), max_size=6), min_size=1, max_size=4), st.integers(0, 1000))
@settings(max_examples=60)
def test_every_row_sees_its_own_ancestors(choices: list[list[int]], seed: int) -> None:
    """Penalties, bad words and min_tokens of a node are those of a chain that ends with it."""
    vocab_size = 7
    generator = torch.Generator().manual_seed(seed)
    parents = [[min(choice, node) - 1 for node, choice in enumerate(own)] for own in choices]
    token_ids = torch.randint(0, vocab_size, (sum(map(len, parents)),), generator=generator)
    drafts = DraftTokens(
        token_ids=token_ids,
        cu_num_draft_tokens=[0, *itertools.accumulate(map(len, parents))],
        parent_indices=[parent for own in parents for parent in own],
    )
    if not any(parents):
        return
    params = [
        SamplingParams(repetition_penalty=1.3, frequency_penalty=0.5, presence_penalty=0.25, min_tokens=b % 4)
        for b in range(len(parents))
    ]
    words = ((1,), (2, 3), (4, 5, 6), (1, 1))
    requests = make_requests(params)
    for request in requests:
        request.bad_words_token_ids = words
    logits = torch.randn(len(token_ids) + len(parents), vocab_size, generator=generator)
    paths = [
        [int(token_ids[start + node]) for node in path]
        for start, shape in zip(drafts.cu_num_draft_tokens, drafts.shapes, strict=False)
        for path in ((), *shape.paths)
    ]
    owners = [b for b, own in enumerate(parents) for _ in range(len(own) + 1)]
    deepest = max(drafts.depths)
    padded = torch.tensor([[*path, *[-1] * (deepest - len(path))] for path in paths], dtype=torch.int64)
    keys = {"vocab_size": vocab_size, "eos_token_ids": (0,), "device": "cpu"}
    build = SamplingRows.build
    rows = build(requests, owners, [len(p) for p in paths], padded, path_idx=list(range(len(paths))), **keys)  # type: ignore[arg-type]
    processed = process_logits(logits, rows)
    for row, (owner, path) in enumerate(zip(owners, paths, strict=True)):
        chain = torch.tensor([path], dtype=torch.int64) if path else None
        alone = build([requests[owner]], [0], [len(path)], chain, **keys)  # type: ignore[arg-type]
        assert torch.equal(process_logits(logits[row : row + 1], alone)[0], processed[row])


@pytest.mark.parametrize("has_probs", [False, True])
@pytest.mark.parametrize("method", RULES)
def test_a_step_of_trees_reads_nothing_back_to_the_host(method: str, has_probs: bool) -> None:
    case = random_trees(30, 37, seed=7, has_probs=has_probs)
    with NoReadback():  # type: ignore[no-untyped-call]
        case.verify(method)


# --- several steps --------------------------------------------------------------------------------------------------

NUM_REQUESTS, NUM_TOKENS, VOCAB_SIZE = 24_000, 4, 4
TREES_AFTER = ([-1, 0, 0, -1, 3], [-1, -1, -1], [], [-1, 0, -1, 1])  # by the last token


def decode_trees(method: str, kind: str, target: Tensor, draft: Tensor, num_requests: int = NUM_REQUESTS) -> Tensor:
    """Speculative decoding of a Markov chain by trees of drawn or of likeliest candidates, [num_requests, NUM_TOKENS].

    kind: "drawn" without replacement with the DRAFT stream, "coupled" with the target's, "likeliest" k candidates.
    """
    sampler = make_sampler(method)
    keys_by_step = sampler.rule.keys_by_draft_step
    tokens = torch.zeros(num_requests, NUM_TOKENS + 5, dtype=torch.int64)
    lengths = torch.ones(num_requests, dtype=torch.int64)
    widest = max(len(own) for tree in TREES_AFTER for own in tree_shape(tree).children)
    while int(lengths.min()) < NUM_TOKENS + 1:
        active = (lengths < NUM_TOKENS + 1).nonzero().squeeze(1)
        last = tokens[active, lengths[active] - 1]
        results = torch.full((len(active), 5), -1)
        for kind_of_tree, parents in enumerate(TREES_AFTER):
            of = (last == kind_of_tree).nonzero().squeeze(1)
            if len(of) == 0:
                continue
            seeds, start, shape = active[of], lengths[active[of]], tree_shape(parents)
            said = [last[of]]  # the token of each row: the pending one's, then the nodes'
            draft_probs = []
            for node, parent in enumerate(parents):
                logits, position = draft[said[parent + 1]], start + shape.depths[node] - 1
                if kind != "likeliest":
                    stream, step = (Stream.TARGET, 0) if kind == "coupled" else (Stream.DRAFT, start * keys_by_step)
                    noise = gumbel(seeds, position, stream, step, vocab_size=VOCAB_SIZE)
                else:
                    noise = torch.zeros_like(logits)
                rank = shape.children[parent + 1].index(node)
                order = (logits + noise).argsort(dim=-1, descending=True)
                said.append(order[:, rank])
                draft_probs.append(logits.scatter(1, order[:, :rank], float("-inf")).softmax(-1))
            assert widest <= VOCAB_SIZE
            positions = torch.stack([start, *(start + depth for depth in shape.depths)], dim=1).flatten()
            rows = sampled_rows(seeds.repeat_interleave(len(parents) + 1), positions, VOCAB_SIZE)
            drafts = DraftTokens(
                token_ids=torch.stack(said[1:], dim=1).flatten() if parents else torch.empty(0, dtype=torch.int64),
                cu_num_draft_tokens=[index * len(parents) for index in range(len(of) + 1)],
                probs=torch.stack(draft_probs, dim=1).flatten(0, 1) if draft_probs and kind != "likeliest" else None,
                parent_indices=list(parents) * len(of),
            )
            output = sampler(target[torch.stack(said, dim=1).flatten()], drafts, rows)
            results[of, : output.token_ids.shape[1]] = output.token_ids
        for place in range(5):
            tokens[active, (lengths[active] + place).clamp(max=NUM_TOKENS + 4)] = results[:, place]
        lengths[active] += (results >= 0).sum(dim=1)
    return tokens[:, 1 : NUM_TOKENS + 1]


@pytest.fixture(scope="module")
def markov() -> tuple[Tensor, Tensor, Tensor]:
    return markov_case(NUM_TOKENS, VOCAB_SIZE)


@pytest.mark.parametrize(
    ("method", "kind"),
    [
        ("probabilistic", "drawn"),
        ("probabilistic", "coupled"),
        ("probabilistic", "likeliest"),
        ("block", "drawn"),
        ("block", "likeliest"),
    ],
)
def test_several_steps_of_trees_jointly_follow_the_target_distribution(
    markov: tuple[Tensor, Tensor, Tensor], method: str, kind: str
) -> None:
    target, draft, probs = markov
    tokens = decode_trees(method, kind, target, draft)
    assert_follows(sequence_index(tokens, VOCAB_SIZE), probs, f"{method} over trees of {kind} candidates")


@pytest.mark.parametrize("kind", ["drawn", "coupled", "likeliest"])
def test_strict_says_over_several_steps_what_plain_decoding_says(
    markov: tuple[Tensor, Tensor, Tensor], kind: str
) -> None:
    target, draft, _ = markov
    num_requests = 2000  # tokens are compared, not distributions
    plain = torch.zeros(num_requests, NUM_TOKENS + 1, dtype=torch.int64)
    for place in range(NUM_TOKENS):
        rows = sampled_rows(torch.arange(num_requests), torch.full((num_requests,), place + 1), VOCAB_SIZE)
        plain[:, place + 1] = sample_tokens(target[plain[:, place]], rows)
    assert torch.equal(decode_trees("strict", kind, target, draft, num_requests), plain[:, 1:])


def test_one_variate_for_all_siblings_biases_the_text(
    markov: tuple[Tensor, Tensor, Tensor], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Negative control: why siblings draw by their rank. The same simulation finds the mistake beyond doubt."""
    target, draft, probs = markov

    def one_for_all(seeds: Tensor, positions: Tensor, *, stream: int, num_entries: int) -> Tensor:
        return uniforms(seeds, positions, stream, num_entries=1).expand(-1, num_entries)

    monkeypatch.setattr(tree_module, "uniforms", one_for_all)
    index = sequence_index(decode_trees("probabilistic", "drawn", target, draft), VOCAB_SIZE)
    value = p_value(torch.bincount(index, minlength=len(probs)), probs * len(index))
    assert value < ALPHA * 1e-8
