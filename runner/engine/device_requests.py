"""The requests' state on the device: a whole step reads and advances it without the host.

The host loads the requests once, before the first such step, and then uploads only the numbers of new blocks.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from kernels.reference.philox import seed_to_int64
from kernels.reference.tree_rows import NO_BRANCH
from runner.engine.device_batch import DeviceBatch
from runner.engine.device_processors import DeviceProcessors
from runner.engine.device_sampling import DeviceSampling
from runner.engine.request import Request
from runner.engine.sampling_flags import SamplingFlags
from runner.engine.step_operations import place_dtype
from runner.engine.upload import to_device


class DeviceRequests:
    """Tensors that stay in place: what is captured over a batch of them reads what is loaded next."""

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
        self._of_requests = DeviceSampling.empty(capacity, device)
        self._of_rows: dict[int, DeviceSampling] = {}  # by the rows of each request in a verification
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
            self._of_rows[num_rows] = DeviceSampling.empty(self.capacity * num_rows, self.device)
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
