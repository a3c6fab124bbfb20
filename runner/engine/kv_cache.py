"""The paged KV cache: tensors on the device. Whose their blocks are is `block_manager.py`'s.

One block table serves every model of a run: block b of the target's cache and block b of the draft's hold the
same positions of the same text. Block 0 is the null block, for rows that belong to no request. On a CPU they write
there, and nobody reads it unmasked. A GPU's kernels store nothing in it, so rows of absent requests attend to its
zeros.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

import torch

from kernels.cpu.huge_pages import in_huge_pages
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
    ) -> None:
        """states: of each layer that has one in place of keys and values, whose width is 0."""
        self.states = states
        # Zeroed: a masked key contributes 0 * value, which is 0 for every finite value and NaN for garbage.
        sizes = [num_blocks * block_size * width for width in layer_widths]
        self._kv = in_huge_pages(torch.empty(sum(sizes), dtype=dtype, device=device)).zero_()
        self.layers = [
            part.view(num_blocks, block_size, width)
            for part, width in zip(self._kv.split_with_sizes(sizes), layer_widths, strict=True)
        ]
        self._slots = [layer.flatten(0, 1) for layer in self.layers]
        offsets = [layer.storage_offset() for layer in self.layers]
        self._layout = torch.tensor([offsets, layer_widths], dtype=torch.int64, device=device)
        self._move = move_kv_on(device, widest=max(layer_widths))

    def write(self, layer: int, slot_mapping: torch.Tensor, kv: torch.Tensor) -> None:
        """Store kv [num_rows, width] in the slots [num_rows] of one layer."""
        self._slots[layer].index_copy_(0, slot_mapping, kv)

    def move(self, source_slots: torch.Tensor, target_slots: torch.Tensor) -> None:
        """Bring what is in source_slots to target_slots, in all layers; both [num_requests, num_moves] int64.

        A request's moves are made in order; none goes to a slot that a later one reads. Slot 0 to 0 moves nothing.
        """
        offsets, widths = self._layout.unbind(0)
        self._move(self._kv, offsets, widths, source_slots, target_slots)


def move_kv_on(device: torch.device, *, widest: int) -> Callable[..., None]:
    """The op for a device: the Triton kernel on CUDA, elsewhere the one that is compiled for a CPU."""
    if runs_kernels(device):
        from kernels.move_kv import move_kv
    else:
        from kernels.cpu.move_kv import move_kv
    return partial(move_kv, widest=widest)
