"""Sampling parameters of requests, or of the rows that verify their drafts, on the device: a value a row."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from runner.engine.row_sampling import RowSampling
from runner.engine.sampling_flags import SamplingFlags


@dataclass(frozen=True, kw_only=True)
class DeviceSampling:
    seeds: Tensor
    is_greedy: Tensor
    temperatures: Tensor
    min_p: Tensor
    top_k: Tensor
    top_p: Tensor

    @classmethod
    def empty(cls, num_rows: int, device: torch.device) -> DeviceSampling:
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
