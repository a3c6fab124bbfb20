"""Runs a draft model whose embeddings have projections of the target's hidden states added to them (PARD-2).

Projected once, a token's are kept in the draft's cache, as a layer behind those of its keys and values: whoever finds
the blocks of a prompt finds them there, and no request has states of its own to keep.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from kernels.cpu.panels import pack
from kernels.reference.fp8_rows import NO_SCALES
from proposers.heads.target_features import TargetFeatures
from runner.engine.decoder import Decoder
from runner.engine.device_batch import DeviceBatch
from runner.engine.head_runner import pad_to_tiles
from runner.engine.launch import Launch
from runner.engine.launch_shapes import can_pack
from runner.engine.model_runner import ModelRunner
from runner.engine.operations import take_rows
from runner.engine.segment import Family, Segment
from runner.engine.upload import to_device


class FeatureRunner(ModelRunner):
    def __init__(self, model: Decoder, features: TargetFeatures, **options: Any) -> None:
        """options: of ModelRunner."""
        super().__init__(model, **options)
        self.features = features
        if can_pack([features.target_proj.weight]):
            features.convert(pack)
        of_zeros = features.of_zeros()  # states in front of a text
        self._of_zeros = torch.zeros((), dtype=self.dtype, device=self.device) if of_zeros is None else of_zeros
        self.other_dtypes = {len(self.kv_widths): self.dtype}
        self.kv_widths, self.kv_scales = [*self.kv_widths, features.hidden_size], [*self.kv_scales, NO_SCALES]

    def store(self, family: Family, segments: Sequence[Segment], states: torch.Tensor) -> None:
        """Keep what comes of the target's states [num_rows, num_taps * hidden] of the segments' tokens."""
        tile = self.shapes[family].linear
        slots = [slot for own in segments for slot in own.slots(own.start, own.start + own.num_tokens, self.block_size)]
        features = self.features(pad_to_tiles(states, tile), tile)[: len(states)]
        self._store(to_device(slots, torch.int64, self.device), features)

    def store_verified(self, batch: DeviceBatch, hidden_states: list[torch.Tensor], token_ids: torch.Tensor) -> None:
        """The same of all rows of a verification, captured; what it rejected is overwritten by the next one.

        Arguments as of CapturedDrafter.learn.
        """
        launch, _ = self.decode_launch(batch, token_ids.flatten(), offset=-1, num_rows=token_ids.shape[1])
        self._store(launch.slot_mapping, self.features(torch.cat(hidden_states, dim=1), launch.linear_tile))

    def _store(self, slots: torch.Tensor, features: torch.Tensor) -> None:
        """Slot 0 takes what rows of nobody have; `kept` does not read it."""
        assert self.cache is not None, "allocate_cache comes first"
        self.cache.write(len(self.cache.layers) - 1, slots, features)

    def inputs_beside(self, launch: Launch, num_rows: int) -> tuple[torch.Tensor, ...]:
        slots = [slot for segment in launch.segments for slot in self._slots_before(segment)]
        slots += [0] * (num_rows - len(slots))
        return (self.kept(to_device(slots, torch.int64, self.device)),)

    def _slots_before(self, segment: Segment) -> list[int]:
        """Of the token before each of a segment's; of masks before the last committed one."""
        last = segment.start + segment.num_tokens - segment.num_drafts - 1
        slots = [0] if segment.start == 0 else []
        slots += segment.slots(max(0, segment.start - 1), last, self.block_size)
        return slots + slots[-1:] * segment.num_drafts

    def kept(self, slots: torch.Tensor) -> torch.Tensor:
        """What is added to rows whose tokens stand behind those of the slots [num_rows]; 0: behind none."""
        assert self.cache is not None, "allocate_cache comes first"
        rows = take_rows(self.cache.layers[-1].flatten(0, 1), slots)
        return torch.where(slots.unsqueeze(1) > 0, rows, self._of_zeros)
