"""The paged KV cache: tensors on the device. Whose their blocks are is `block_manager.py`'s.

One block table serves every model of a run: block b of the target's cache and block b of the draft's hold the
same positions of the same text. Block 0 is the null block, for rows that belong to no request. On a CPU they write
there, and nobody reads it unmasked. A GPU's kernels store nothing in it, so rows of absent requests attend to its
zeros.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from itertools import accumulate

import torch

from kernels.cpu.huge_pages import in_huge_pages
from kernels.reference.fp8_rows import FP8, NO_SCALES, KVScales, in_dtype_of_cache
from kernels.reference.gated_delta import DeltaStates
from kernels.reference.short_conv import ConvStates
from runner.engine.backend import runs_kernels

LayerStates = DeltaStates | ConvStates  # of one layer, in place of keys and values


class PagedKVCache:
    """KV of one model, a tensor a layer: [num_blocks, block_size, width], keys before values in a row.

    The layers are views of one allocation, so that one launch can move slots in all of them.
    """

    def __init__(
        self,
        layer_widths: list[int],
        num_blocks: int,
        block_size: int,
        dtype: torch.dtype,
        device: torch.device,
        *,
        states: Sequence[LayerStates | None] = (),
        scales: Sequence[KVScales] = (),
        other_dtypes: Mapping[int, torch.dtype] | None = None,
    ) -> None:
        """
        Args:
            dtype: of keys and values; FP8 or that of the model.
            states: of each layer that has one in place of keys and values, whose width is 0.
            scales: of each layer's keys and values, in FP8; none: they are kept as they are.
            other_dtypes: of layers that keep something else than keys and values.
        """
        self.states = states
        self.scales = list(scales) if scales and dtype == FP8 else [NO_SCALES] * len(layer_widths)
        dtypes = [dtype] * len(layer_widths)
        for layer, other in (other_dtypes or {}).items():
            dtypes[layer] = other
        row_bytes = [width * own.itemsize for width, own in zip(layer_widths, dtypes, strict=True)]
        sizes = [num_blocks * block_size * size for size in row_bytes]
        # Zeroed: a masked key contributes 0 * value, which is 0 for every finite value and NaN for garbage.
        octets = in_huge_pages(torch.empty(sum(sizes), dtype=torch.uint8, device=device)).zero_()
        self.layers = [
            part.view(own).view(num_blocks, block_size, width)
            for part, own, width in zip(octets.split_with_sizes(sizes), dtypes, layer_widths, strict=True)
        ]
        self._slots = [layer.flatten(0, 1) for layer in self.layers]
        unit = torch.uint8 if any(size % 2 for size in row_bytes) else torch.int16  # that is moved at once
        self._units, widths = octets.view(unit), [size // unit.itemsize for size in row_bytes]
        offsets = [width * num_blocks * block_size for width in accumulate([0, *widths[:-1]])]
        self._layout = torch.tensor([offsets, widths], dtype=torch.int64, device=device)
        self._move = move_kv_on(device, widest=max(widths))

    def write(self, layer: int, slot_mapping: torch.Tensor, kv: torch.Tensor) -> None:
        """Store kv [num_rows, width] in the slots [num_rows] of one layer; halves, where the layer's scales differ."""
        slots, width = self._slots[layer], kv.shape[1]
        stored = in_dtype_of_cache(kv, slots.dtype, self.scales[layer], values_from=width // 2)
        if slots.dtype == FP8:  # torch has no copies of rows of these
            slots, stored = slots.view(torch.uint8), stored.view(torch.uint8)
        slots.index_copy_(0, slot_mapping, stored)

    def move(self, source_slots: torch.Tensor, target_slots: torch.Tensor) -> None:
        """Bring what is in source_slots to target_slots, in all layers; both [num_requests, num_moves] int64.

        A request's moves are made in order; none goes to a slot that a later one reads. Slot 0 to 0 moves nothing.
        """
        offsets, widths = self._layout.unbind(0)
        self._move(self._units, offsets, widths, source_slots, target_slots)


def move_kv_on(device: torch.device, *, widest: int) -> Callable[..., None]:
    """The op for a device: the Triton kernel on CUDA, elsewhere the one that is compiled for a CPU."""
    if runs_kernels(device):
        from kernels.move_kv import move_kv
    else:
        from kernels.cpu.move_kv import move_kv
    return partial(move_kv, widest=widest)
