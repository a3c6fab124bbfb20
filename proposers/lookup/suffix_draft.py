"""One step of suffix decoding for a batch, in one compiled call: take in new tokens, match, draft.

Every suffix of a request's text that occurs in a tree is a match. A draft goes on from the end of a match to the
heaviest child again and again; its score is how many of its tokens will be accepted if the counts are right, and the
highest score wins (arXiv 2411.04975). The text's own end counts as an occurrence in the request's tree, as in
arctic-inference: what followed the only earlier one has probability 1/2.
"""

from __future__ import annotations

import numpy as np

from kernels.cpu.compiled import compiled
from proposers.lookup.suffix_bush import EPSILON, grow, occurrences
from proposers.lookup.suffix_forest import CHILD, COUNT, DEPTH, START, Int32Array, Uint32Array, find
from proposers.lookup.suffix_tree import extend
from proposers.lookup.wide import wide

# Columns of a request's row; behind them the active points of its own tree, then those of the shared one.
ROOT = 0
BASE = 1  # where its text starts
CAPACITY = 2  # tokens there is room for, a power of two
LENGTH = 3
NUM_ACTIVE = 4  # windows of its own tree that wait inside edges: every length up to this is a match
NUM_MATCHED = 5  # every suffix up to this length occurs in the shared tree
VERSION = 6  # of the shared tree, when it was matched last
NUM_COLUMNS = 8

# Columns of a job
ROW = 0
NUM_NEW = 1  # tokens to take in
LIMIT = 2  # tokens to draft at most

# Columns of a draft
NUM_DRAFTED = 0
MATCH_LENGTH = 1
SCORE = 2  # the bits of a float32
TOKENS = 3  # from here on; behind as many as there may be, the parents of a tree's

FOREVER = 2**31 - 1  # as the end of a text: it grows


@compiled
def _match(
    nodes: Int32Array,
    slots: Uint32Array,
    shared: Int32Array,  # the shared tree's text
    root: int,
    text: Int32Array,
    base: int,
    points: Int32Array,
    num_matched: int,
    begin: int,
    end: int,
    max_depth: int,
) -> int:
    """Follow the text's tokens begin..end-1 in the shared tree; returns how many suffixes occur there, length 1 up.

    As `extend`, but nothing is inserted: a window that comes to a token of its own is dropped.
    """
    ring, mask = points.size - 1, shared.size - 1
    for position in range(begin, end):
        token = text[base + position]
        is_missing = True
        for start in range(position - num_matched, position + 1):
            length = position - start
            node = int(points[start & ring]) if length > 0 else root
            if length < nodes[node, DEPTH]:
                if is_missing and shared[(nodes[node, START] + length) & mask] != token:
                    continue
            else:
                node = find(nodes, slots, node, token)
                if node == 0:
                    continue
                points[start & ring] = node
            if is_missing:
                is_missing = False
                num_matched = min(length + 1, max_depth - 1)  # from full depth nothing goes on
        if is_missing:
            num_matched = 0
    return num_matched


@compiled
def _walk(
    nodes: Int32Array,
    node: int,
    length: int,  # of the match
    num_tokens: int,  # at most
    min_token_prob: float,
    to_beat: float,
    active: Int32Array,
    num_active: int,  # 0 in the shared tree, where no window waits inside an edge
    text_end: int,
    spelled: Int32Array,  # [num_tokens] or empty: where the winner's tokens are
) -> tuple[float, int]:
    """Score of the draft behind a match, and its number of tokens; (0, 0) as soon as it cannot beat `to_beat`."""
    ring = active.size - 1
    count = occurrences(nodes, node, length, active, num_active, text_end)
    depth, prob, score, num_drafted = length, 1.0, 0.0, 0
    waiting = length  # lengths of waiting windows below this are accounted for on this edge
    while True:
        edge_end = int(nodes[node, DEPTH])
        if num_active > 0:
            edge_end = min(edge_end, text_end - int(nodes[node, START]))  # a leaf's edge ends with the text
        while depth < edge_end and num_drafted < num_tokens:
            stop, is_last = edge_end, True
            while waiting <= num_active and waiting < edge_end:
                if active[(text_end - waiting) & ring] == node:
                    stop, is_last = waiting, False
                    break
                waiting += 1
            taken = min(stop - depth, num_tokens - num_drafted)
            for offset in range(min(taken, spelled.size - num_drafted)):
                spelled[num_drafted + offset] = nodes[node, START] + depth + offset
            score += prob * taken
            num_drafted += taken
            depth += taken
            if is_last or num_drafted == num_tokens:
                break
            # A window ends here: one of the occurrences goes no further.
            prob *= (count - 1) / count
            count -= 1
            waiting += 1
            if prob < min_token_prob - EPSILON:
                return score, num_drafted
            if score + prob * (num_tokens - num_drafted) <= to_beat + EPSILON:
                return 0.0, 0
        if num_drafted == num_tokens:
            return score, num_drafted
        child = int(nodes[node, CHILD])
        if child == 0:
            return score, num_drafted
        prob *= nodes[child, COUNT] / count
        if prob < min_token_prob - EPSILON:
            return score, num_drafted
        if score + prob * (num_tokens - num_drafted) <= to_beat + EPSILON:
            return 0.0, 0
        node, count, waiting = child, int(nodes[child, COUNT]), depth + 1


@compiled
def _num_tokens(limit: int, length: int, max_depth: int, max_spec_factor: float) -> int:
    """Tokens drafted at most behind a match of this length."""
    return min(int(min(float(limit), length * max_spec_factor + 1e-6)), max_depth - length)


@compiled
def _best_match(
    nodes: Int32Array,
    text: Int32Array,
    base: int,
    mask: int,
    points: Int32Array,
    num_matched: int,
    num_active: int,
    text_end: int,
    limit: int,
    max_depth: int,
    max_spec_factor: float,
    min_token_prob: float,
    to_beat: float,
    drafts_trees: bool,
) -> tuple[float, int]:
    """Score and match length of the best draft of one tree that beats `to_beat`; the longest match among equals."""
    best, best_length = to_beat, 0
    nowhere = np.empty(0, dtype=np.int32)
    for length in range(num_matched, 0, -1):
        if min(float(limit), length * max_spec_factor + 1e-6) <= best + EPSILON:
            break  # nor can any shorter one be better
        num_tokens = _num_tokens(limit, length, max_depth, max_spec_factor)
        if num_tokens <= best + EPSILON:
            continue
        node = wide(points[(text_end - length) & (points.size - 1)])
        if drafts_trees:
            score, _ = grow(
                nodes, text, base, mask, node, length, num_tokens, min_token_prob, points, num_active, text_end,
                nowhere, nowhere,
            )  # fmt: skip
        else:
            score, _ = _walk(
                nodes, node, length, num_tokens, min_token_prob, best, points, num_active, text_end, nowhere
            )
        if score > best + EPSILON:
            best, best_length = score, length
    return best, best_length


@compiled
def _draft(
    nodes: Int32Array,
    text: Int32Array,
    base: int,
    mask: int,
    points: Int32Array,
    num_active: int,
    text_end: int,
    length: int,
    num_tokens: int,
    min_token_prob: float,
    drafts_trees: bool,
    tokens: Int32Array,
    parents: Int32Array,
) -> int:
    """Write the tokens behind a match; returns how many there are."""
    node = wide(points[(text_end - length) & (points.size - 1)])
    if drafts_trees:
        _, num_drafted = grow(
            nodes, text, base, mask, node, length, num_tokens, min_token_prob, points, num_active, text_end,
            tokens, parents,
        )  # fmt: skip
        return num_drafted
    _, num_drafted = _walk(nodes, node, length, num_tokens, min_token_prob, -1.0, points, num_active, text_end, tokens)
    for place in range(num_drafted):
        tokens[place] = text[base + (tokens[place] & mask)]
    return num_drafted


@compiled
def step(
    nodes: Int32Array,
    slots: Uint32Array,
    text: Int32Array,
    shared_nodes: Int32Array,
    shared_slots: Uint32Array,
    shared_text: Int32Array,
    rows: Int32Array,  # [num_rows, NUM_COLUMNS + 2 * ring]
    jobs: Int32Array,  # [num_jobs or more, 3]
    num_jobs: int,
    new_tokens: Int32Array,  # flat, NUM_NEW of each job
    drafts: Int32Array,  # [num_jobs or more, TOKENS + 2 * largest LIMIT]
    shared_root: int,  # 0: no shared tree
    version: int,
    max_depth: int,
    max_spec_factor: float,
    min_token_prob: float,
    drafts_trees: bool,
) -> None:
    """Take new tokens into the jobs' rows and trees and draft for each; nodes and texts have room for them."""
    ring = (rows.shape[1] - NUM_COLUMNS) // 2
    num_taken = 0
    for job in range(num_jobs):
        row = rows[jobs[job, ROW]]
        active, points = row[NUM_COLUMNS : NUM_COLUMNS + ring], row[NUM_COLUMNS + ring :]
        base, mask, begin = wide(row[BASE]), wide(row[CAPACITY]) - 1, wide(row[LENGTH])
        end = begin + jobs[job, NUM_NEW]
        for position in range(begin, end):
            text[base + position] = new_tokens[num_taken]
            num_taken += 1
        row[LENGTH] = end
        row[NUM_ACTIVE] = extend(
            nodes,
            slots,
            text,
            base,
            mask,
            wide(row[ROOT]),
            active,
            wide(row[NUM_ACTIVE]),
            begin,
            end,
            wide(FOREVER),
            max_depth,
        )
        if shared_root != 0:
            reach = max(0, end - max_depth + 1)  # a match is not longer than max_depth - 1
            if row[VERSION] != version or begin < reach:
                begin, row[NUM_MATCHED], row[VERSION] = reach, 0, version
            row[NUM_MATCHED] = _match(
                shared_nodes, shared_slots, shared_text, shared_root, text, base, points, wide(row[NUM_MATCHED]), begin,
                end, max_depth,
            )  # fmt: skip
        num_active, num_matched, limit = wide(row[NUM_ACTIVE]), wide(row[NUM_MATCHED]), wide(jobs[job, LIMIT])
        score, length = _best_match(
            nodes, text, base, mask, active, num_active, num_active, end, limit, max_depth, max_spec_factor,
            min_token_prob, 0.0, drafts_trees,
        )  # fmt: skip
        shared_score, shared_length = _best_match(
            shared_nodes, shared_text, wide(0), shared_text.size - 1, points, num_matched, wide(0), end, limit,
            max_depth, max_spec_factor, min_token_prob, score, drafts_trees,
        )  # fmt: skip
        draft = drafts[job]
        tokens, parents = draft[TOKENS : TOKENS + limit], draft[TOKENS + limit : TOKENS + 2 * limit]
        num_drafted = 0
        if shared_length > 0:
            score, length = shared_score, shared_length
            num_tokens = _num_tokens(limit, length, max_depth, max_spec_factor)
            num_drafted = _draft(
                shared_nodes, shared_text, wide(0), shared_text.size - 1, points, wide(0), end, length, num_tokens,
                min_token_prob, drafts_trees, tokens, parents,
            )  # fmt: skip
        elif length > 0:
            num_tokens = _num_tokens(limit, length, max_depth, max_spec_factor)
            num_drafted = _draft(
                nodes, text, base, mask, active, num_active, end, length, num_tokens, min_token_prob, drafts_trees,
                tokens, parents,
            )  # fmt: skip
        draft[NUM_DRAFTED] = num_drafted
        draft[MATCH_LENGTH] = length
        draft[SCORE] = np.float32(score).view(np.int32)
