"""The requests' state on the device: a whole step reads and advances it without the host.

The host loads the requests once, before the first such step, and then uploads only the numbers of new blocks.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from kernels.paged_segments import PagedSegments
from kernels.recurrent_segments import RecurrentSegments
from kernels.reference.philox import seed_to_int64
from kernels.reference.tree_rows import NO_BRANCH, TreeRows
from runner.engine.device_processors import DeviceProcessors, Processors
from runner.engine.forward_batch import ForwardBatch
from runner.engine.paged_shape import PagedAttention, PagedShape
from runner.engine.request import Request
from runner.engine.row_sampling import RowSampling
from runner.engine.sampling_flags import SamplingFlags
from runner.engine.step_operations import chain_rows, place_dtype
from runner.engine.upload import to_device


@dataclass(frozen=True, kw_only=True)
class _Values:
    """Sampling parameters, a value a row."""

    seeds: Tensor
    is_greedy: Tensor
    temperatures: Tensor
    min_p: Tensor
    top_k: Tensor
    top_p: Tensor

    @classmethod
    def empty(cls, num_rows: int, device: torch.device) -> _Values:
        def tensor(dtype: torch.dtype) -> Tensor:
            return torch.zeros(num_rows, dtype=dtype, device=device)

        return cls(
            seeds=tensor(torch.int64),
            is_greedy=tensor(torch.bool),
            temperatures=tensor(torch.float32),
            min_p=tensor(torch.float32),
            top_k=tensor(torch.int64),
            top_p=tensor(torch.float64),
        )

    def fill(self, integers: Tensor, floats: Tensor, repeats: int) -> None:
        columns = (
            *zip((self.seeds, self.is_greedy, self.top_k), integers, strict=True),
            *zip((self.temperatures, self.min_p, self.top_p), floats, strict=True),
        )
        for held, values in columns:
            held[: len(values) * repeats].view(len(values), repeats).copy_(values.unsqueeze(1))

    def sampling(self, sampling_flags: SamplingFlags, positions: Tensor) -> RowSampling:
        def of_rows(values: Tensor) -> Tensor:
            return values[: len(positions)]

        return RowSampling(
            seeds=of_rows(self.seeds),
            positions=positions,
            all_greedy=sampling_flags.all_greedy,
            is_greedy=None if sampling_flags.all_greedy else of_rows(self.is_greedy),
            temperatures=None if sampling_flags.all_greedy else of_rows(self.temperatures),
            min_p=of_rows(self.min_p) if sampling_flags.min_p else None,
            top_k=of_rows(self.top_k) if sampling_flags.top_k else None,
            top_p=of_rows(self.top_p) if sampling_flags.top_p else None,
        )


@dataclass(frozen=True, kw_only=True)
class DeviceBatch:
    """The first places of DeviceRequests, for one layout of steps: views, the same ones in every step."""

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
    of_requests: _Values
    of_rows: _Values

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


class DeviceRequests:
    def __init__(
        self,
        *,
        capacity: int,
        max_model_len: int,
        block_size: int,
        vocab_size: int,
        eos_token_ids: tuple[int, ...],
        device: torch.device,
    ) -> None:
        self.capacity, self.max_model_len, self.device = capacity, max_model_len, device
        self.lengths = torch.zeros(capacity, dtype=torch.int64, device=device)
        self.limits = torch.zeros(capacity, dtype=torch.int64, device=device)
        self.caps = torch.zeros(capacity, dtype=torch.int64, device=device)
        self.num_prompt_tokens = torch.zeros(capacity, dtype=torch.int64, device=device)
        self.last_token_ids = torch.zeros(capacity, 2, dtype=torch.int64, device=device)
        self.state_slots = torch.zeros(capacity, dtype=torch.int64, device=device)
        max_blocks = -(-max_model_len // block_size)
        dtype = place_dtype(device)
        self.block_tables = torch.zeros(capacity, max_blocks, dtype=dtype, device=device)
        self._branch_starts = torch.full((capacity,), NO_BRANCH, dtype=dtype, device=device)
        self._branch_slots = torch.empty(capacity, 0, dtype=dtype, device=device)
        self._of_requests = _Values.empty(capacity, device)
        self._of_rows: dict[int, _Values] = {}  # by the rows of each request in a verification
        self._unfilled = set[int]()  # of these
        self._loaded: tuple[Tensor, Tensor] | None = None  # sampling parameters, integers and floats, of each request
        self.processors = DeviceProcessors(
            capacity=capacity, vocab_size=vocab_size, eos_token_ids=eos_token_ids, device=device
        )
        self._num_blocks: list[int] = []  # of each request's table, here already

    def load(self, requests: Sequence[Request], sampling_flags: SamplingFlags) -> None:
        """Requests with at least two tokens, in the first places; the others are absent from now on."""
        if sampling_flags.processors is not None:
            self.processors.load(requests, sampling_flags.processors)
        params = [request.sampling_params for request in requests]
        self.lengths.zero_()
        self.limits.zero_()
        self.state_slots.zero_()
        self.block_tables.zero_()
        self._num_blocks = [0] * len(requests)
        last = [request.tokens_between(request.num_tokens - 2, request.num_tokens) for request in requests]
        numbers = to_device(
            [
                [request.num_tokens for request in requests],
                [
                    min(request.num_prompt_tokens + request.sampling_params.max_tokens, self.max_model_len)
                    for request in requests
                ],
                [before for before, _ in last],
                [token_id for _, token_id in last],
                [request.num_prompt_tokens for request in requests],
                [self._most_tokens(p.max_draft_tokens) for p in params],
                [request.state_slot for request in requests],
                [seed_to_int64(request.seed) for request in requests],
                [p.is_greedy for p in params],
                [0 if p.is_greedy else max(p.top_k, 0) for p in params],
            ],
            torch.int64,
            self.device,
        )
        floats = to_device(
            [
                [1.0 if p.is_greedy else p.temperature for p in params],
                [0.0 if p.is_greedy else p.min_p for p in params],
                [1.0 if p.is_greedy else p.top_p for p in params],
            ],
            torch.float64,
            self.device,
        )
        self.lengths[: len(requests)].copy_(numbers[0])
        self.limits[: len(requests)].copy_(numbers[1])
        self.last_token_ids[: len(requests)].copy_(numbers[2:4].t())
        self.num_prompt_tokens[: len(requests)].copy_(numbers[4])
        self.caps[: len(requests)].copy_(numbers[5])
        self.state_slots[: len(requests)].copy_(numbers[6])
        self._loaded, self._unfilled = (numbers[7:], floats), set(self._of_rows)
        self._of_requests.fill(*self._loaded, 1)
        self.extend_tables(range(len(requests)), requests)

    def _most_tokens(self, max_draft_tokens: int | None) -> int:
        """That a step may bring a request which wants no more drafts; None: any number."""
        return self.max_model_len if max_draft_tokens is None else min(max_draft_tokens, self.max_model_len) + 1

    def remove(self, places: Sequence[int]) -> None:
        """Mark requests as absent, by their places in `load`; their blocks may belong to others now."""
        index = to_device(places, torch.int64, self.device)
        self.lengths.index_fill_(0, index, 0)
        self.limits.index_fill_(0, index, 0)
        self.state_slots.index_fill_(0, index, 0)
        self.block_tables.index_fill_(0, index, 0)  # a drafter may have rows of theirs left to compute

    def extend_tables(self, places: Sequence[int], requests: Sequence[Request]) -> None:
        """Append the blocks that requests have got since; places: those of the requests in `load`."""
        rows, columns, blocks = list[int](), list[int](), list[int]()
        for row, request in zip(places, requests, strict=True):
            fresh = request.block_table[self._num_blocks[row] :]
            rows += [row] * len(fresh)
            columns += range(self._num_blocks[row], len(request.block_table))
            blocks += fresh
            self._num_blocks[row] = len(request.block_table)
        if blocks:
            index = to_device([rows, columns, blocks], torch.int64, self.device)
            self.block_tables.index_put_((index[0], index[1]), index[2].to(self.block_tables.dtype))

    def fill_rows(self, num_rows: int) -> None:
        """What every row of a verification takes from its request, if that is not there yet; num_rows: of each."""
        if num_rows not in self._of_rows:
            self._of_rows[num_rows] = _Values.empty(self.capacity * num_rows, self.device)
            self._unfilled.add(num_rows)
        if num_rows in self._unfilled:
            assert self._loaded is not None, "load comes first"
            self._of_rows[num_rows].fill(*self._loaded, num_rows)
            self._unfilled.remove(num_rows)

    def batch(self, count: int, sampling_flags: SamplingFlags, max_context: int, num_rows: int) -> DeviceBatch:
        """num_rows: of each request in a verification, and filled."""
        return DeviceBatch(
            count=count,
            num_rows=num_rows,
            lengths=self.lengths[:count],
            limits=self.limits[:count],
            caps=self.caps[:count] if sampling_flags.caps else None,
            num_prompt_tokens=self.num_prompt_tokens[:count],
            last_token_ids=self.last_token_ids[:count],
            state_slots=self.state_slots[:count],
            block_tables=self.block_tables[:count],
            branch_starts=self._branch_starts[:count],
            branch_slots=self._branch_slots[:count],
            sampling_flags=sampling_flags,
            processors=self.processors.of_batch(count, sampling_flags.processors, num_rows),
            max_context=max_context,
            of_requests=self._of_requests,
            of_rows=self._of_rows[num_rows],
        )
