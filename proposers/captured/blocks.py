"""A head's pass over a block of masks (proposers/drafting/blocks.py), captured.

It keeps no state, for all that it reads lies in the head's cache.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from proposers.captured.token_by_token import CapturedChains
from proposers.heads.dflash import DFlashHead
from runner.engine.device_batch import DeviceBatch
from runner.engine.head_runner import HeadRunner
from runner.engine.upload import to_device


class CapturedBlock(CapturedChains):
    head: DFlashHead

    def __init__(self, *, head: DFlashHead, runner: HeadRunner, depths: Sequence[int] | None, **common: Any) -> None:
        """depths: how deep the block is where there is room for 1, 2, ... drafts; None: 1, 2, ..."""
        super().__init__(max_model_len=head.max_model_len, **common)
        self.head, self.runner = head, runner
        self._depths = to_device(depths or range(1, self.num_tokens + 1), torch.int64, runner.device)
        self.tap_layers, self.known_tokens = head.config.tap_layers, head.known_tokens

    @property
    def tile(self) -> int | None:
        """Of the rows that products of the head take."""
        return self.runner.shapes["decode"].linear

    def blocks(self, batch: DeviceBatch) -> Tensor:
        """The head's output, [count, num_silent + depth, hidden]: the silent rows of a block come first."""
        config, count, num_silent = self.head.config, batch.count, self.head.config.num_silent
        num_rows = self.depth + num_silent
        masks = batch.last_token_ids.new_full((count, num_rows - 1), config.mask_token_id)
        token_ids = torch.cat((batch.last_token_ids[:, 1:], masks), dim=1).flatten()
        launch, _ = self.runner.decode_launch(batch, token_ids, offset=-1, num_rows=num_rows)
        # A row sees as much of its block as in a step in parts, where no mask stands beyond the room for drafts.
        room = (batch.step_limits - batch.lengths - 1).clamp(1, len(self._depths))
        depths = self._depths.index_select(0, room - 1)
        segments = launch.attention.segments
        ends = (batch.lengths - 2 + num_silent + depths).clamp(min=0).to(torch.int32).unsqueeze(1)
        segments = replace(segments, last_keys=ends.expand(-1, len(segments.last_keys) // count).flatten())
        launch = replace(launch, attention=replace(launch.attention, segments=segments))
        output = self.runner.compute(launch, self.head.embed(token_ids))
        return output.view(count, num_rows, -1)

    def learn(self, batch: DeviceBatch, hidden_states: list[Tensor], token_ids: Tensor) -> None:
        """Write the context of every verified row; what was rejected is overwritten by the next block or context."""
        assert self.runner.cache is not None, "allocate_cache comes first"
        launch, _ = self.runner.decode_launch(batch, token_ids.flatten(), offset=-1, num_rows=token_ids.shape[1])
        self.head.write_context(launch, torch.cat(hidden_states, dim=1), self.runner.cache)
