"""Which tokens two vocabularies share, and what a draft reads in place of those it does not have.

Token-level intersection (TLI of Timor et al., arXiv 2502.05202; vLLM's use_heterogeneous_vocab): the draft says shared
tokens only. It reads one token of its own for each of the target's, so that a token has one place in both caches.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass

from proposers.vocabularies.spelling import ROLES, Spelling

STAND_IN_ROLES = ("unk", "bos", "eos")  # of the draft, for a token that prints nothing it knows


@dataclass(frozen=True, kw_only=True)
class Intersection:
    """Of a target's vocabulary and a draft's."""

    pairs: Mapping[int, int]  # target's id -> draft's id; no id on either side is in two pairs
    reading: list[int]  # [target vocab]: the draft's token for each of the target's, its partner where there is one
    num_texts: int  # pairs of tokens that print something


def intersect(target: Spelling, draft: Spelling, *, target_vocab_size: int, draft_vocab_size: int) -> Intersection:
    """Compare two vocabularies, as far as the models have logits for them.

    Tokens that print the same bytes are partners; where several do, in the order of their ids, pieces before byte
    tokens. Special tokens are partners of the tokens of the same name, the others left over of those of the same role.
    """
    ours, theirs = _by_text(target, target_vocab_size), _by_text(draft, draft_vocab_size)
    pairs: dict[int, int] = {}
    for text, target_ids in ours.items():
        pairs |= zip(target_ids, theirs.get(text, ()), strict=False)
    num_texts = len(pairs)
    taken = set(pairs.values())

    draft_names = {name: token_id for token_id, name in draft.names.items()}
    candidates = [(token_id, draft_names.get(name)) for token_id, name in sorted(target.names.items())]
    candidates += [(target.roles[role], draft.roles.get(role)) for role in ROLES if role in target.roles]
    for target_id, draft_id in candidates:
        if draft_id is None or target_id >= target_vocab_size or draft_id >= draft_vocab_size:
            continue
        if target_id not in pairs and draft_id not in taken:
            pairs[target_id] = draft_id
            taken.add(draft_id)
    return Intersection(
        pairs=dict(sorted(pairs.items())),
        reading=_reading(target, draft, pairs, theirs, target_vocab_size, draft_vocab_size),
        num_texts=num_texts,
    )


def _by_text(spelling: Spelling, vocab_size: int) -> dict[bytes, list[int]]:
    """The ids of the tokens that print a text, the one that a tokenizer would choose first."""
    ids: defaultdict[bytes, list[int]] = defaultdict(list)
    for token_id in sorted(spelling.texts, key=lambda token_id: (token_id in spelling.byte_token_ids, token_id)):
        if token_id < vocab_size:
            ids[spelling.texts[token_id]].append(token_id)
    return dict(ids)


def _reading(
    target: Spelling,
    draft: Spelling,
    pairs: Mapping[int, int],
    theirs: Mapping[bytes, list[int]],
    target_vocab_size: int,
    draft_vocab_size: int,
) -> list[int]:
    roles = {role: token_id for role, token_id in draft.roles.items() if token_id < draft_vocab_size}
    unknown = next((roles[role] for role in STAND_IN_ROLES if role in roles), 0)
    reading = [unknown] * target_vocab_size
    for token_id, text in target.texts.items():
        if token_id < target_vocab_size:
            reading[token_id] = stand_in(text, theirs, unknown)
    for role in reversed(ROLES):
        if role in roles and target.roles.get(role, target_vocab_size) < target_vocab_size:
            reading[target.roles[role]] = roles[role]
    for token_id, draft_id in pairs.items():
        reading[token_id] = draft_id
    return reading


def stand_in(text: bytes, ids: Mapping[bytes, list[int]], unknown: int) -> int:
    """The token that prints the longest end of a text: what comes next hangs most on what came last.

    So accepted more often than the longest beginning, and far more often than one token for all unknown ones.
    """
    found = (ids[text[start:]][0] for start in range(len(text)) if text[start:] in ids)
    return next(found, unknown)
