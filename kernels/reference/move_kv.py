"""Moves cached keys and values from slot to slot, in all layers: an accepted branch of a draft tree into its place.

Moves of a request happen one after another. Branches are moved to the front, so no slot is read after it is written.
"""

from __future__ import annotations

import torch


def move_kv(
    kv: torch.Tensor,  # [num_elements]: of each layer, row after row of its slots
    layer_offsets: torch.Tensor,  # [num_layers] int64: where a layer begins in kv
    layer_widths: torch.Tensor,  # [num_layers] int64: elements of a slot
    source_slots: torch.Tensor,  # [num_requests, num_moves] int64
    target_slots: torch.Tensor,  # [num_requests, num_moves] int64; move i goes nowhere behind source i
) -> None:
    """Slot target_slots[b, i] takes what is in source_slots[b, i], for i = 0, 1, ...; equal slots move nothing."""
    ends = [*layer_offsets.tolist()[1:], kv.numel()]
    for offset, end, width in zip(layer_offsets.tolist(), ends, layer_widths.tolist(), strict=True):
        slots = kv[offset:end].view(-1, width)
        for sources, targets in zip(source_slots.unbind(1), target_slots.unbind(1), strict=True):
            slots.index_copy_(0, targets, slots.index_select(0, sources))
