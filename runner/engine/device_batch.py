"""The first places of DeviceRequests, for one layout of steps: views, the same ones in every step, and launches."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from kernels.paged_segments import PagedSegments
from kernels.recurrent_segments import RecurrentSegments
from kernels.reference.tree_rows import TreeRows
from runner.engine.device_processors import Processors
from runner.engine.device_sampling import DeviceSampling
from runner.engine.forward_batch import ForwardBatch
from runner.engine.paged_shape import PagedAttention, PagedShape
from runner.engine.row_sampling import RowSampling
from runner.engine.sampling_flags import SamplingFlags
from runner.engine.step_operations import chain_rows


@dataclass(frozen=True, kw_only=True)
class DeviceBatch:
    count: int  # requests, absent ones included
    num_rows: int  # of each request in a verification
    lengths: Tensor  # [count] int64: committed tokens; 0: absent
    limits: Tensor  # [count] int64: committed tokens that a request may come to; 0: it is absent
    caps: Tensor | None  # [count] int64: tokens that a step may bring a request; None: nobody asks for fewer
    num_prompt_tokens: Tensor  # [count] int64
    last_token_ids: Tensor  # [count, 2] int64: the last two committed tokens
    state_slots: Tensor  # [count] int64: Request.state_slot
    block_tables: Tensor  # [count, max_blocks] of place_dtype, as the next two
    branch_starts: Tensor  # [count]
    branch_slots: Tensor  # [count, 0]
    sampling_flags: SamplingFlags
    processors: Processors | None  # None: nobody asks to change logits
    max_context: int  # keys that any row sees lie before it
    of_requests: DeviceSampling
    of_rows: DeviceSampling

    @property
    def step_limits(self) -> Tensor:
        """[count] int64: committed tokens that a request may come to in this step."""
        return self.limits if self.caps is None else torch.minimum(self.limits, self.lengths + self.caps)

    def launch(
        self,
        token_ids: Tensor,  # [count * num_rows] int64
        *,
        offset: int,  # a request's first row stands at lengths + offset
        num_rows: int,  # of each request
        shape: PagedShape,
        block_size: int,
        lengths: Tensor | None = None,  # [count] int64, in place of the batch's; 0: absent
        num_computed_again: int = 0,  # of a request's last committed tokens, in a later launch
    ) -> tuple[ForwardBatch, Tensor]:
        """A launch of consecutive rows of every request, and the position that each row predicts, -1 for padding."""
        rows = chain_rows(
            self.lengths if lengths is None else lengths,
            self.block_tables,
            offset=offset,
            num_rows=num_rows,
            block_size=block_size,
            rows_per_tile=shape.rows_per_tile,
        )
        segments = PagedSegments(
            tile_segments=rows.tile_segments,
            tile_rows=rows.tile_rows,
            tile_sizes=rows.tile_sizes,
            tile_positions=rows.tile_positions,
            last_keys=rows.last_keys,
            block_tables=self.block_tables,
            branch_starts=self.branch_starts,
            branch_slots=self.branch_slots,
            max_context=self.max_context,
            max_tile_size=min(num_rows, shape.rows_per_tile),
        )
        batch = ForwardBatch(
            family="decode",
            token_ids=token_ids,
            positions=rows.positions,
            slot_mapping=rows.slots,
            attention=PagedAttention(segments=segments, split_keys=shape.split_keys),
            recurrent=RecurrentSegments(
                starts=self.lengths if lengths is None else lengths,
                ends=self.lengths,
                slots=self.state_slots,
                offset=offset,
                end_offset=-num_computed_again,
                num_rows=num_rows,
            ),
            linear_tile=shape.linear,
        )
        return batch, rows.predicted

    def launch_of_copies(
        self,
        token_ids: Tensor,  # [count * num_copies] int64
        *,
        offset: int,  # all rows of a request stand at lengths + offset
        num_copies: int,  # rows of each request
        shape: PagedShape,
        block_size: int,
    ) -> ForwardBatch:
        """A launch of rows that stand at the same place of their request's text, and see what lies up to it."""
        copies = replace(
            self,
            count=self.count * num_copies,
            lengths=_repeated(self.lengths, num_copies),
            block_tables=_repeated(self.block_tables, num_copies),
            branch_starts=_repeated(self.branch_starts, num_copies),
            branch_slots=_repeated(self.branch_slots, num_copies),
            state_slots=_repeated(self.state_slots, num_copies),
        )
        return copies.launch(token_ids, offset=offset, num_rows=1, shape=shape, block_size=block_size)[0]

    def tree_launch(
        self,
        token_ids: Tensor,  # [count * num_rows] int64
        rows: TreeRows,
        shape: PagedShape,
    ) -> ForwardBatch:
        """A launch of rows of every request's tree; each sees the committed tokens and its own path."""
        return ForwardBatch(
            family="decode",
            token_ids=token_ids,
            positions=rows.positions,
            slot_mapping=rows.slots,
            attention=shape.tree_attention(rows, self.block_tables, max_context=self.max_context),
            recurrent=None,
            linear_tile=shape.linear,
        )

    def sampling(self, positions: Tensor) -> RowSampling:
        """Sampling parameters of the verified rows, or of the requests: as many as there are positions."""
        values = self.of_requests if len(positions) == self.count else self.of_rows
        assert len(positions) in (self.count, self.count * self.num_rows)
        return values.sampling(self.sampling_flags, positions)


def _repeated(rows: Tensor, num_copies: int) -> Tensor:
    """[count, ...] -> [count * num_copies, ...], each row so many times in a row."""
    return rows.unsqueeze(1).expand(-1, num_copies, *rows.shape[1:]).flatten(0, 1).contiguous()
