"""The rows with penalties, and how often each token was said before them, draft ancestors included."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from kernels.reference.sampling import add_ancestor_counts_
from runner.engine.request import Request
from runner.engine.request_tensors import RequestTensors
from runner.engine.upload import index_or_all, to_device


@dataclass(frozen=True, kw_only=True)
class PenaltyRows:
    row_idx: Tensor | None  # [num_used] int64; None = all rows
    seen: Tensor  # [num_used, vocab] bool: in prompt or output; prompts count only where repetition != 1
    output_counts: Tensor  # [num_used, vocab] int32: output and draft ancestors
    repetition: Tensor  # [num_used] float32
    frequency: Tensor  # [num_used] float32
    presence: Tensor  # [num_used] float32

    @classmethod
    def build(
        cls,
        owners: list[Request],
        tensors: list[RequestTensors],
        num_ancestors: list[int],
        draft_token_ids: Tensor | None,
        path_idx: list[int],
        device: torch.device,
    ) -> PenaltyRows | None:
        """As SamplingRows.build, with each row's request and its tensors; None when no request has penalties."""
        used = [r for r, owner in enumerate(owners) if owner.sampling_params.has_penalties]
        if not used:
            return None
        params = [owners[r].sampling_params for r in used]
        output_counts = torch.stack([tensors[r].output_counts(owners[r].output_token_ids) for r in used])
        if any(num_ancestors[r] for r in used):
            assert draft_token_ids is not None, "rows with ancestors need draft_token_ids"
            paths = draft_token_ids[to_device([path_idx[r] for r in used], torch.int64, device)]
            depths = to_device([num_ancestors[r] for r in used], torch.int64, device)
            add_ancestor_counts_(output_counts, paths, depths)
        seen = output_counts > 0
        if any(p.repetition_penalty != 1.0 for p in params):
            seen |= torch.stack([tensors[r].is_in_prompt for r in used])
        values = to_device(
            [[p.repetition_penalty, p.frequency_penalty, p.presence_penalty] for p in params], torch.float32, device
        )
        return cls(
            row_idx=index_or_all(used, len(owners), device),
            seen=seen,
            output_counts=output_counts,
            repetition=values[:, 0],
            frequency=values[:, 1],
            presence=values[:, 2],
        )
