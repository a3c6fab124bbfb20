"""Models that add up what they find in the cache, so that a wrong block, position, state or token shows at once.

The state of a token is the digest of the tokens up to it and its position; the next token's logits are the digest's row
of a table. Drafters know the rule and so the target's next tokens, but guess wrong in one context of five.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch

from runner.engine.forward_batch import ForwardBatch
from runner.engine.hidden_states import NORMED
from runner.engine.kv_cache import PagedKVCache

VOCAB_SIZE, NUM_STATES = 64, 257
TABLE = torch.randn(NUM_STATES, VOCAB_SIZE, generator=torch.Generator().manual_seed(1))


def weight(positions: torch.Tensor) -> torch.Tensor:
    return 31 * positions + 7


def store(batch: ForwardBatch, cache: PagedKVCache, values: torch.Tensor) -> None:
    cache.layers[0].flatten(0, 1)[batch.slot_mapping, 0] = values.float()


def owners_of(batch: ForwardBatch) -> torch.Tensor:
    """The segment of each row."""
    segments = batch.attention.segments
    owners = torch.zeros(len(batch.token_ids), dtype=torch.int64)
    for owner, row, size in zip(segments.tile_segments, segments.tile_rows, segments.tile_sizes, strict=True):
        owners[row : row + size] = owner
    return owners


def stored_at(batch: ForwardBatch, cache: PagedKVCache) -> torch.Tensor:
    """What is stored for each row at every place, [num_rows, num_places] int64."""
    stored, block_size = cache.layers[0].flatten(0, 1), cache.layers[0].shape[1]
    segments, owners = batch.attention.segments, owners_of(batch)
    keys = torch.arange(segments.block_tables.shape[1] * block_size)
    tables = segments.block_tables[owners // segments.segments_per_table]
    slots = tables[:, keys // block_size].long() * block_size + keys % block_size
    branch = segments.branch_slots[owners].long()
    if branch.shape[1] > 0:
        places = keys - segments.branch_starts[owners].unsqueeze(1)
        is_apart = (places >= 0) & (places < branch.shape[1])
        slots = torch.where(is_apart, branch.gather(1, places.clamp(0, branch.shape[1] - 1)), slots)
    return stored[slots, 0].long()


def tokens_at(batch: ForwardBatch, cache: PagedKVCache) -> torch.Tensor:
    """Of caches that hold tokens."""
    return stored_at(batch, cache) - 1


def sum_of_context(batch: ForwardBatch, cache: PagedKVCache, last_keys: torch.Tensor) -> torch.Tensor:
    """What is stored for each row up to its last key [num_rows], every place by its weight, modulo NUM_STATES."""
    stored = stored_at(batch, cache)
    keys = torch.arange(stored.shape[1])
    return (stored * weight(keys) * (keys <= last_keys.unsqueeze(1))).sum(dim=1) % NUM_STATES


def step(states: torch.Tensor, token_ids: torch.Tensor) -> torch.Tensor:
    """States [num_rows, 2] one token later."""
    positions = states[:, 1] + 1
    return torch.stack(((states[:, 0] + (token_ids + 1) * weight(positions)) % NUM_STATES, positions), dim=1)


def roll(states: torch.Tensor, num_steps: int) -> torch.Tensor:
    """States after the likeliest tokens."""
    for _ in range(num_steps):
        states = step(states, TABLE[states[:, 0].long()].argmax(dim=1))
    return states


def logits_of(states: torch.Tensor, *, is_wrong: torch.Tensor | bool = False) -> torch.Tensor:
    return TABLE[(states[:, 0].long() + is_wrong) % NUM_STATES]


class HashingModel:
    vocab_size = VOCAB_SIZE

    def __init__(self, *, is_draft: bool = False) -> None:
        self.is_draft = is_draft

    def __call__(
        self, batch: ForwardBatch, cache: PagedKVCache, taps: tuple[int, ...]
    ) -> tuple[torch.Tensor, list[torch.Tensor]]:
        store(batch, cache, batch.token_ids + 1)
        digests = sum_of_context(batch, cache, batch.positions)
        return torch.stack((digests, batch.positions), dim=1).float(), []

    def logits(self, hidden: torch.Tensor, tile: int | None) -> torch.Tensor:
        return logits_of(hidden, is_wrong=self.is_draft & (hidden[:, 0] % 5 == 0))


class HashingHead:
    """An autoregressive head: rows of tokens, each stored at the place before its own."""

    tap_layers = (NORMED,)
    known_tokens = None

    def __init__(self, head: Any) -> None:
        self.max_model_len, self.attentions, self.kv_widths = head.max_model_len, head.attentions, head.kv_widths

    def project(self, states: torch.Tensor) -> torch.Tensor:
        return states

    def __call__(self, batch: ForwardBatch, hidden: torch.Tensor, cache: PagedKVCache) -> torch.Tensor:
        store(batch, cache, batch.token_ids + 1)
        is_wrong = sum_of_context(batch, cache, batch.positions) % 5 == 0
        output = step(hidden, batch.token_ids)
        output[:, 0] = (output[:, 0] + is_wrong) % NUM_STATES
        return output

    def logits(self, output: torch.Tensor, tile: int | None) -> torch.Tensor:
        return logits_of(output)


class HashingMaskModel(HashingModel):
    """PARD's model: masks, and tokens that look like one, stand for the likeliest tokens."""

    def __init__(self, mask_token_id: int) -> None:
        super().__init__(is_draft=True)
        self.mask_token_id = mask_token_id

    def __call__(
        self, batch: ForwardBatch, cache: PagedKVCache, taps: tuple[int, ...]
    ) -> tuple[torch.Tensor, list[torch.Tensor]]:
        store(batch, cache, batch.token_ids + 1)
        last = batch.positions.clone()
        token_ids = tokens_at(batch, cache)
        for row, position in enumerate(batch.positions.tolist()):
            while position > 0 and token_ids[row, position] == self.mask_token_id:
                position -= 1
            last[row] = position
        states = torch.stack((sum_of_context(batch, cache, last), last), dim=1)
        rows = [roll(states[row : row + 1], int(batch.positions[row] - last[row]))[0] for row in range(len(states))]
        return torch.stack(rows).float(), []


class HashingMaskableHead(HashingHead):
    """P-EAGLE's: a mask's state is no state, so its row goes on from the row before."""

    mask_token_id: int | None = 1

    def mask_state(self) -> torch.Tensor:
        return torch.tensor([[-1.0, -1.0]])

    def __call__(self, batch: ForwardBatch, hidden: torch.Tensor, cache: PagedKVCache) -> torch.Tensor:
        output = super().__call__(batch, hidden, cache)
        for row in range(1, len(output)):
            if hidden[row, 0] < 0:
                output[row] = roll(output[row - 1 : row], 1)[0]
        return output


class HashingBlocks:
    """DFlash's head: digests of the context in the cache, overwritten by blocks of an anchor and masks."""

    config = SimpleNamespace(tap_layers=(NORMED,), num_silent=1, mask_token_id=1, max_draft_tokens=9)
    known_tokens = None

    def __init__(self, head: Any) -> None:
        self.max_model_len, self.attentions, self.kv_widths = head.max_model_len, head.attentions, head.kv_widths

    def embed(self, token_ids: torch.Tensor) -> torch.Tensor:
        return token_ids.float().unsqueeze(1)

    def write_context(self, batch: ForwardBatch, states: torch.Tensor, cache: PagedKVCache) -> None:
        store(batch, cache, states[:, 0])

    def __call__(self, batch: ForwardBatch, hidden: torch.Tensor, cache: PagedKVCache) -> torch.Tensor:
        segments, owners = batch.attention.segments, owners_of(batch)
        firsts, anchors, ends = (torch.zeros(int(owners.max()) + 1, dtype=torch.int64) for _ in range(3))
        tiles = (segments.tile_segments, segments.tile_rows, segments.tile_positions, segments.last_keys)
        for owner, row, position, last_key in reversed(list(zip(*(t.tolist() for t in tiles), strict=True))):
            if owner < len(firsts):
                firsts[owner], anchors[owner], ends[owner] = row, position, last_key
        context = anchors[owners] - 1  # the last place whose state is the target's
        stored, block_size = cache.layers[0].flatten(0, 1), cache.layers[0].shape[1]
        blocks = segments.block_tables[owners].long().gather(1, (context // block_size).clamp(min=0).unsqueeze(1))
        states = torch.stack((stored[blocks[:, 0] * block_size + context % block_size, 0], context), dim=1)
        # Its rows see the whole block, so how long that is has its part in them.
        is_wrong = (sum_of_context(batch, cache, context) % 5 == 0) ^ ((ends - anchors)[owners] < 3)
        store(batch, cache, batch.token_ids)
        outputs = step(states, batch.token_ids[firsts[owners]])
        for row, depth in enumerate((batch.positions - anchors[owners]).tolist()):
            guessed = max(depth - self.config.num_silent, 0)
            outputs[row] = roll(outputs[row : row + 1], guessed)[0]
        outputs[:, 0] = (outputs[:, 0] + is_wrong) % NUM_STATES
        return outputs.float()

    def logits(self, output: torch.Tensor, tile: int | None) -> torch.Tensor:
        return logits_of(output)


class HashingBlocksAndSequel(HashingBlocks):
    """DSpark's head: every row guesses, and all tokens on the way to a guess may make it another one."""

    config = SimpleNamespace(tap_layers=(NORMED,), num_silent=0, mask_token_id=1, max_draft_tokens=9)

    def __init__(self, head: Any) -> None:
        super().__init__(head)
        self.sequel = HashingSequel()


class HashingSequel:
    has_state = True

    def first_state(self, silent: torch.Tensor | None, token_ids: torch.Tensor, tile: int | None) -> torch.Tensor:
        return torch.zeros(len(token_ids), 1)

    def places(self, hidden: torch.Tensor, logits: torch.Tensor, tile: int | None) -> tuple[torch.Tensor, ...]:
        return (logits,)

    def guess(
        self,
        place: int,
        places: tuple[torch.Tensor, ...],
        state: torch.Tensor,
        token_ids: torch.Tensor,
        tile: int | None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        (logits,) = places
        state = (3 * state + token_ids.unsqueeze(1) + 1) % NUM_STATES
        added = 8 * TABLE[state[:, 0].long()] * (state % 6 == 0)
        return (logits.unsqueeze(1) + added.view(len(logits), -1, added.shape[1])).flatten(0, 1), state


class HashingLastStates:
    """Medusa's heads: from the state before the last committed token to the tokens behind it."""

    def logits(self, states: torch.Tensor, head: int, tile: int | None) -> torch.Tensor:
        return logits_of(roll(states, head + 1), is_wrong=states[:, 0] % 5 == 0)


class HashingRecurrence:
    """The MLP speculator: a state that takes in one token after another."""

    def first_state(self, states: torch.Tensor) -> torch.Tensor:
        return states

    def next_state(self, step_: int, state: torch.Tensor, token_ids: torch.Tensor, tile: int | None) -> torch.Tensor:
        return step(state, token_ids)

    def logits(self, step_: int, state: torch.Tensor, tile: int | None) -> torch.Tensor:
        return logits_of(state, is_wrong=state[:, 0] % 5 == 0)
