"""Committed tokens behind those of their requests: the reference against lists, a CPU's kernel against the same."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from kernels.cpu.append_tokens import append_tokens as on_cpu
from kernels.reference.append_tokens import append_tokens as reference

WIDTH, NUMBER = 12, 4


@st.composite
def batches(draw: st.DrawFn) -> dict[str, Any]:
    """Texts with room for one token more than the longest may have; who gets tokens, and which."""
    texts = draw(st.lists(st.lists(st.integers(0, 9), max_size=WIDTH - 1), min_size=1, max_size=4))
    chosen = draw(st.permutations(range(len(texts))))[: draw(st.integers(0, len(texts)))]
    slots = draw(st.permutations([*chosen, *[-1] * draw(st.integers(0, 2))]))
    return {"texts": texts, "slots": slots, "new": [draw(st.lists(st.integers(0, 9), max_size=NUMBER)) for _ in slots]}


@pytest.mark.parametrize("append_tokens", [reference, on_cpu])
@given(case=batches())
def test_each_text_goes_on_with_its_own_tokens(append_tokens: Any, case: dict[str, Any]) -> None:
    """Rows of new tokens may lie apart; where a text ends, the last column takes what is too much."""
    texts = [*case["texts"], []]  # and nobody's
    token_ids = torch.tensor([[*text, *[7] * (WIDTH - len(text))] for text in texts], dtype=torch.int32)
    lengths = torch.tensor([len(text) for text in texts])
    padded = [[*new, *[-1] * (NUMBER + 2 - len(new))] for new in case["new"]]
    new = torch.tensor(padded, dtype=torch.int64).view(-1, NUMBER + 2)[:, :NUMBER]
    append_tokens(token_ids, lengths, torch.tensor(case["slots"], dtype=torch.int64), new)
    for slot, own in zip(case["slots"], case["new"], strict=True):
        if slot >= 0:
            texts[slot] = texts[slot] + own
    for row, text in enumerate(texts[:-1]):
        assert lengths[row] == len(text)
        assert token_ids[row, : min(len(text), WIDTH - 1)].tolist() == text[: WIDTH - 1]
