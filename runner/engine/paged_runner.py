"""What runs layers over a paged KV cache: the target, a draft model, a draft head.

Owns the cache, the shapes of launches and the graphs that they become; packs the weights of our own layers.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor

from kernels.cpu.panels import Change, Weight, pack
from kernels.reference.fp8_rows import KVScales
from runner.engine.attention import Attention
from runner.engine.backend import runs_kernels
from runner.engine.device_batch import DeviceBatch
from runner.engine.forward_batch import ForwardBatch
from runner.engine.graphs import GraphMemory, GraphStore
from runner.engine.kv_cache import LayerStates, PagedKVCache
from runner.engine.launch_shapes import Shapes, can_pack, decoder_shapes, require_shared_memory
from runner.engine.paged_shape import PagedShape
from runner.engine.programs import can_record, graph_store, step_graph_store
from runner.engine.tile_shape import ANY_SHAPE_TILES
from runner.engine.transformers_model import TransformersModel


class PagedLayers(Protocol):
    """Layers of our own, or one that transformers' code runs inside a head."""

    max_model_len: int

    @property
    def kv_widths(self) -> list[int]:
        """Elements a token takes in each layer's cache."""

    @property
    def attentions(self) -> Sequence[Attention]:
        """One of each shape that its layers have; none where transformers' own code attends."""

    def convert(self, change: Change) -> None:
        """As Decoder.convert, of all products."""


class PagedRunner:
    def __init__(
        self,
        layers: PagedLayers | TransformersModel,
        *,
        block_size: int,
        device: torch.device,
        dtype: torch.dtype,
        batch_invariant: bool,
        graph_memory: GraphMemory | None,
        kv_dtype: torch.dtype | None = None,
        products: Sequence[Weight] = (),
        is_recurrent: bool = False,
    ) -> None:
        """
        Args:
            kv_dtype: of keys and values in the cache; None: dtype.
            graph_memory: passes become graphs there, but for long prompts; None: each kernel is launched alone.
            products: weights that must be fit to be packed, as attention's must, or none is.
            is_recurrent: some layers have states that a launch moves on.
        """
        self.is_recurrent, captures_graphs = is_recurrent, graph_memory is not None
        self.block_size, self.device, self.dtype, self.kv_dtype = block_size, device, dtype, kv_dtype or dtype
        self.kv_widths, self.kv_scales = layers.kv_widths, list[KVScales]()  # none: no layer has some
        self.other_dtypes: dict[int, torch.dtype] = {}  # of layers of the cache that hold no keys and values
        self.shapes: Shapes = dict(ANY_SHAPE_TILES)
        if isinstance(layers, TransformersModel):
            captures_graphs = False  # what transformers' code does between its products is torch's
            if batch_invariant and not runs_kernels(device):
                layers.keep_rows(pack)
        elif attentions := layers.attentions:
            if can_pack([*(weight for own in attentions for weight in own.product_weights), *products]):
                layers.convert(pack)
            if runs_kernels(device):
                require_shared_memory(attentions, dtype, self.kv_dtype, device)
            captures_graphs = captures_graphs and can_record(attentions[0].o_proj.weight)
            self.shapes = decoder_shapes(
                attentions,
                batch_invariant=batch_invariant,
                max_model_len=layers.max_model_len,
                is_bucketed=captures_graphs,
            )
        self.graph_memory = graph_memory if captures_graphs else None
        self.graphs = self._new_graphs()
        self.cache: PagedKVCache | None = None
        self._num_uncertain = 0

    @property
    def is_paged(self) -> bool:
        """Whether launches over generated tokens can be laid out on the device, and captured with a whole step."""
        return self.graphs is not None and isinstance(self.shapes["decode"], PagedShape)

    @property
    def paged_shape(self) -> PagedShape:
        """Of launches over generated tokens, where they are paged."""
        shape = self.shapes["decode"]
        assert isinstance(shape, PagedShape), "is_paged says so"
        return shape

    @property
    def most_captured_prompt_rows(self) -> int:
        """Of a launch; 0 where none is captured."""
        shape = self.shapes["prefill"]
        return shape.buckets.most_rows if isinstance(shape, PagedShape) and shape.buckets is not None else 0

    def decode_launch(
        self,
        batch: DeviceBatch,
        token_ids: Tensor,
        *,
        offset: int,
        num_rows: int,
        lengths: Tensor | None = None,
        num_computed_again: int = 0,
    ) -> tuple[ForwardBatch, Tensor]:
        """As DeviceBatch.launch, in the shape and the blocks of this runner."""
        is_earlier = lengths is not None  # than the last committed token
        self.require_room(offset + num_rows + num_computed_again - is_earlier)
        return batch.launch(
            token_ids,
            offset=offset,
            num_rows=num_rows,
            shape=self.paged_shape,
            block_size=self.block_size,
            lengths=lengths,
            num_computed_again=num_computed_again,
        )

    def require_room(self, num_uncertain: int) -> None:
        """Raises ValueError where states forget what lies so far back."""
        if self.is_recurrent and num_uncertain > self._num_uncertain:
            raise ValueError(f"num_uncertain must be <= {self._num_uncertain}, as allocated, got {num_uncertain}")

    @property
    def cache_bytes_per_block(self) -> int:
        dtypes = [self.other_dtypes.get(layer, self.kv_dtype) for layer in range(len(self.kv_widths))]
        return self.block_size * sum(
            width * dtype.itemsize for width, dtype in zip(self.kv_widths, dtypes, strict=True)
        )

    def allocate_cache(self, num_blocks: int, *, max_num_seqs: int = 0, num_uncertain: int = 0) -> None:
        """
        Args:
            max_num_seqs: requests that run at the same time; of recurrent layers alone, as the next.
            num_uncertain: tokens of a request in a launch that may be taken back, at most.
        """
        self.release_cache()  # graphs of another cache would write there
        self._num_uncertain = num_uncertain
        states = self.empty_states(max_num_seqs, num_uncertain, self.device)
        self.cache = PagedKVCache(
            self.kv_widths,
            num_blocks,
            self.block_size,
            self.kv_dtype,
            self.device,
            states=states,
            scales=self.kv_scales,
            other_dtypes=self.other_dtypes,
        )

    def empty_states(self, max_num_seqs: int, num_uncertain: int, device: torch.device) -> Sequence[LayerStates | None]:
        """Of each layer, where some are recurrent."""
        return ()

    @property
    def has_own_keys(self) -> bool:
        """Whether layers store keys and values; otherwise they see those of another runner's."""
        return any(self.kv_widths)

    def read_cache(self, cache: PagedKVCache) -> None:
        """Of another runner, among whose keys and values the layers store theirs, where they have some."""
        self.release_cache()
        self.cache = cache

    def release_cache(self) -> None:
        self.graphs = self._new_graphs()
        self.cache = None

    def _new_graphs(self) -> GraphStore | None:
        if self.graph_memory is None:
            return None
        # A launch that was made twice, once to prepare and once recorded, would move states on twice.
        new_store = step_graph_store if self.is_recurrent else graph_store
        return new_store(self.device, self.graph_memory)
