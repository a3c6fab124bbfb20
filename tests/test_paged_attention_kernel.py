"""The Triton paged attention: against a dense definition in float64, and a row's bits against the company it keeps."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from kernels.paged_segments import PagedSegments
from kernels.reference.tree_rows import NO_BRANCH, tree_rows

interpreter = pytest.importorskip("triton.runtime.interpreter")
triton_ops = pytest.importorskip("kernels.paged_attention")
merge_splits = pytest.importorskip("kernels.merge_splits")

BLOCK_SIZE = 4  # of the caches here


@dataclass(frozen=True, kw_only=True)
class Rows:
    """Consecutive query rows of one sequence, and where the keys of all its positions are stored."""

    start: int
    size: int
    slots: Sequence[int]  # cache slot of every position, those behind the block table's branch_start anywhere
    branch_start: int = NO_BRANCH

    @property
    def end(self) -> int:
        return self.start + self.size


@dataclass(frozen=True, kw_only=True)
class Model:
    num_heads: int = 2
    num_kv_heads: int = 1
    head_dim: int = 16
    value_dim: int = 16
    options: dict[str, Any] = field(default_factory=dict)  # of paged_attention
    has_sinks: bool = False

    @property
    def width(self) -> int:
        if "values_in_keys" in self.options:
            return self.head_dim
        return self.num_kv_heads * (self.head_dim + self.value_dim)

    def keys(self) -> dict[str, Any]:
        sinks = torch.linspace(-1.0, 3.0, self.num_heads) if self.has_sinks else None
        shape = {"num_kv_heads": self.num_kv_heads, "value_dim": self.value_dim, "scale": self.head_dim**-0.5}
        return {**shape, **self.options, "sinks": sinks}


PLAIN = Model(num_heads=3)  # three heads a group: a packed row of the tile stays empty
LATENT = Model(num_heads=5, head_dim=24, options={"values_in_keys": True})
WIDE = Model(num_heads=8, head_dim=512, value_dim=512)
MODELS = {
    "plain": PLAIN,
    "one head a group, values narrower": Model(num_heads=2, num_kv_heads=2, head_dim=32, value_dim=24),
    "head_dim 96": Model(head_dim=96, value_dim=96),
    "window": Model(options={"sliding_window": 21}),
    "chunks": Model(options={"attention_chunk": 21}),
    "not causal": Model(options={"is_causal": False}),
    "not causal, window": Model(options={"is_causal": False, "sliding_window": 9}),
    "softcap": Model(options={"softcap": 2.0}),
    "softcap far away": Model(options={"softcap": 50.0}),
    "sinks": Model(num_heads=8, num_kv_heads=2, has_sinks=True),
    "sinks, window": Model(has_sinks=True, options={"sliding_window": 21}),
    "values in keys": LATENT,
    "values in keys, window": replace(
        LATENT, head_dim=56, value_dim=40, options=LATENT.options | {"sliding_window": 9}
    ),
    "values are keys": replace(LATENT, head_dim=16, has_sinks=True, options=LATENT.options | {"softcap": 2.0}),
    "values in keys, heads of five programs": replace(LATENT, num_heads=130),
    "values of two programs": WIDE,
    "values of two programs, not causal": replace(WIDE, options={"is_causal": False}),
    "values of two programs, window": replace(
        WIDE, num_heads=6, num_kv_heads=2, value_dim=320, has_sinks=True, options={"sliding_window": 21}
    ),
}
# In float16; of heads of 512 alone, for in float32 the order of these sums costs more than a BLAS's.
HALF = ("plain", "head_dim 96", "values in keys")
HALF += ("values of two programs", "values of two programs, not causal", "values of two programs, window")
SPLIT = ("plain", "one head a group, values narrower", "window", "not causal, window", "sinks, window")
SPLIT += ("values in keys", "values in keys, window", "values in keys, heads of five programs")
SPLIT += ("values of two programs", "values of two programs, not causal", "values of two programs, window")
FORMS = [(name, split_keys) for name in MODELS for split_keys in (None, 32) if split_keys is None or name in SPLIT]


@pytest.fixture(autouse=True)
def products_of_fixed_order(kernel_device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    """The interpreter's products are a BLAS's, which gives equal rows other bits in other places (measured: OpenBLAS).

    These sum over k = 0, 1, ... for every element, however it lies in memory. A GPU's own are tried as they are.
    """
    if kernel_device.type == "cpu":

        def create_dot(self: Any, a: Any, b: Any, d: Any, input_precision: Any, max_num_imprecise_acc: Any) -> Any:
            factors = np.ascontiguousarray(a.data), np.ascontiguousarray(b.data)
            product = np.einsum("mk,kn->mn", *factors, dtype=d.data.dtype)
            return interpreter.TensorHandle(product + d.data, d.dtype.scalar)

        monkeypatch.setattr(interpreter.InterpreterBuilder, "create_dot", create_dot)


@pytest.fixture
def small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Blocks of 16 keys and merges of two splits: short contexts cross borders of every kind."""
    monkeypatch.setattr(triton_ops, "BLOCK_N", 16)
    monkeypatch.setattr(merge_splits, "MERGED_SPLITS", 2)


def in_order(num_positions: int, first_block: int = 0, seed: int | None = None) -> list[int]:
    """Slots of a sequence that owns as many blocks as it needs, shuffled if there is a seed."""
    blocks = torch.arange(first_block, first_block + -(-num_positions // BLOCK_SIZE))
    if seed is not None:
        blocks = blocks[torch.randperm(len(blocks), generator=torch.Generator().manual_seed(seed))]
    return [int(blocks[p // BLOCK_SIZE]) * BLOCK_SIZE + p % BLOCK_SIZE for p in range(num_positions)]


def launch(
    model: Model,
    rows: Sequence[Rows],
    max_context: int,
    device: torch.device,
    num_padding: int = 0,
    rows_per_tile: int | None = None,
) -> Any:
    """PagedSegments of rows that follow one another in the launch; rows_per_tile: other than on a GPU."""
    step = rows_per_tile or triton_ops.rows_per_tile(model.num_heads, model.num_kv_heads)
    tiles, launch_row = [], 0
    for index, own in enumerate(rows):
        for first in range(0, own.size, step):
            size = min(step, own.size - first)
            tiles.append((index, launch_row + first, size, own.start + first, own.end - 1))
        launch_row += own.size
    tiles += [(0, 0, 0, 0, 0)] * num_padding
    tables = torch.zeros(len(rows), -(-max_context // BLOCK_SIZE), dtype=torch.int32)
    branches = [own.slots[own.branch_start : own.end] for own in rows]
    apart = torch.zeros(len(rows), max(map(len, branches)), dtype=torch.int32)
    for index, (own, branch) in enumerate(zip(rows, branches, strict=True)):
        linear = list(own.slots[: min(own.branch_start, own.end)][::BLOCK_SIZE])
        tables[index, : len(linear)] = torch.tensor(linear, dtype=torch.int32) // BLOCK_SIZE
        apart[index, : len(branch)] = torch.tensor(branch, dtype=torch.int32)
    columns = torch.tensor(tiles, dtype=torch.int32).T.contiguous()
    starts = torch.tensor([own.branch_start for own in rows], dtype=torch.int32)
    names = ("tile_segments", "tile_rows", "tile_sizes", "tile_positions", "last_keys")
    tensors = dict(zip(names, columns.unbind(), strict=True))
    tensors |= {"block_tables": tables, "branch_starts": starts, "branch_slots": apart}
    on_device = {name: tensor.to(device) for name, tensor in tensors.items()}
    max_tile_size = max(size for _, _, size, *_ in tiles)
    return PagedSegments(**on_device, max_context=max_context, max_tile_size=max_tile_size)


def run(model: Model, rows: Sequence[Rows], queries: Tensor, cache: Tensor, device: torch.device, **how: Any) -> Tensor:
    """queries [num_rows, num_heads, head_dim] as part of a wider row, as the engine has them."""
    split_keys = how.pop("split_keys")
    longest = max(own.end for own in rows)
    segments = launch(model, rows, how.pop("max_context", longest), device, **how)
    qkv = torch.cat((queries.flatten(1), torch.full((len(queries), 48), torch.nan, dtype=queries.dtype)), dim=1)
    query = qkv.to(device)[:, :-48].view(queries.shape)
    keys = {k: v.to(device) if isinstance(v, Tensor) else v for k, v in model.keys().items()}
    out = triton_ops.paged_attention(query, cache.to(device), segments, split_keys=split_keys, **keys)
    assert out.dtype == queries.dtype
    return out.cpu()


def dense(model: Model, rows: Sequence[Rows], queries: Tensor, cache: Tensor, dtype: torch.dtype) -> Tensor:
    """Row by row, key by key, with products in `dtype`: the definition in float64, plain torch in any other."""
    keys = model.keys()
    exact = dtype if dtype == torch.float64 else torch.float32
    group = model.num_heads // model.num_kv_heads
    outputs, launch_row = [], 0
    for own in rows:
        for position in range(own.start, own.end):
            last = position if keys.get("is_causal", True) else own.end - 1
            window = keys.get("sliding_window") or 2**31
            chunk = keys.get("attention_chunk") or 2**31
            seen = [p for p in range(last + 1) if abs(position - p) < window and p // chunk == position // chunk]
            kv = cache.flatten(0, 1)[[own.slots[p] for p in seen]].to(dtype)
            split = model.num_kv_heads * model.head_dim
            k = kv[:, :split].view(-1, model.num_kv_heads, model.head_dim).repeat_interleave(group, dim=1)
            v = kv[:, : model.value_dim] if "values_in_keys" in keys else kv[:, split:]
            v = v.view(-1, model.num_kv_heads, model.value_dim).repeat_interleave(group, dim=1)
            logits = torch.einsum("hd,nhd->hn", queries[launch_row].to(dtype), k).to(exact) * keys["scale"]
            if softcap := keys.get("softcap"):
                logits = softcap * torch.tanh(logits / softcap)
            if keys["sinks"] is not None:
                logits = torch.cat((logits, keys["sinks"].to(exact)[:, None]), dim=1)
            probs = logits.softmax(dim=1)[:, : len(seen)]
            outputs.append(torch.einsum("hn,nhd->hd", probs.to(dtype), v).flatten())
            launch_row += 1
    return torch.stack(outputs)


def filled_cache(model: Model, rows: Sequence[Rows], dtype: torch.dtype) -> Tensor:
    """What positions hold depends on the sequence and position alone; what no row of it sees is no number."""
    num_blocks = max(max(own.slots) for own in rows) // BLOCK_SIZE + 2
    cache = torch.full((num_blocks, BLOCK_SIZE, model.width), torch.nan, dtype=dtype)
    for index, own in enumerate(rows):
        values = torch.randn(1200, model.width, generator=torch.Generator().manual_seed(index))
        first = max(0, own.start + 1 - model.options.get("sliding_window", 2**31))
        if chunk := model.options.get("attention_chunk"):
            first = own.start // chunk * chunk
        seen = slice(first, own.end)
        cache.flatten(0, 1)[list(own.slots[seen])] = values[seen].to(dtype)
    return cache


def random_queries(model: Model, num_rows: int, dtype: torch.dtype = torch.float32, seed: int = 99) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(num_rows, model.num_heads, model.head_dim, generator=generator).mul(2).to(dtype)


def assert_close(found: Tensor, exact: Tensor, plain: Tensor, ulps: int = 1) -> None:
    """At most twice plain torch's error in the same dtype, and some ulps at the largest value."""
    ulp = torch.finfo(found.dtype).eps * exact.abs().max()
    limit = 2 * (plain.double() - exact).abs().max() + ulps * ulp
    error = (found.double() - exact).abs().max()
    assert error <= limit, f"error {error:.3g}, limit {limit:.3g}"


RAGGED = [
    Rows(start=90, size=1, slots=in_order(91, 0, seed=1)),
    Rows(start=0, size=4, slots=in_order(4, 30)),
    Rows(start=30, size=17, slots=in_order(47, 40, seed=2)),
    Rows(start=0, size=1, slots=in_order(1, 60)),
]


@pytest.mark.usefixtures("small_blocks")
@pytest.mark.parametrize(("name", "split_keys"), FORMS)
def test_a_ragged_launch_is_what_the_definition_says(
    kernel_device: torch.device, name: str, split_keys: int | None
) -> None:
    model, dtype = MODELS[name], torch.float16 if name in HALF else torch.float32
    queries = random_queries(model, sum(own.size for own in RAGGED), dtype)
    cache = filled_cache(model, RAGGED, dtype)
    found = run(model, RAGGED, queries, cache, kernel_device, split_keys=split_keys, num_padding=2)
    exact, plain = (dense(model, RAGGED, queries, cache, kind) for kind in (torch.float64, dtype))
    assert_close(found, exact, plain)


LONG, OTHER = in_order(100, 50), in_order(100, 0, seed=3)
COMPANIES: dict[str, tuple[list[Rows], int, dict[str, int]]] = {
    # Launches that hold one and the same row, of position 70 of LONG, and its place in them.
    "last of a tile, behind others": ([Rows(start=33, size=2, slots=OTHER), Rows(start=67, size=4, slots=LONG)], 5, {}),
    "first of a tile, before others": ([Rows(start=70, size=3, slots=LONG), Rows(start=9, size=1, slots=OTHER)], 0, {}),
    "last of seventeen": ([Rows(start=54, size=17, slots=LONG)], 16, {}),
    "in a graph for longer contexts, beside a branch": (
        [Rows(start=70, size=1, slots=LONG), Rows(start=3, size=2, slots=OTHER, branch_start=4)],
        0,
        {"max_context": 300, "num_padding": 3},
    ),
}


@pytest.mark.usefixtures("small_blocks")
@pytest.mark.parametrize("split_keys", [None, 32])
@pytest.mark.parametrize(
    "name",
    [
        *("plain", "sinks, window", "values in keys", "values in keys, heads of five programs"),
        *("values of two programs", "values of two programs, window"),
    ],
)
def test_a_row_keeps_its_bits_in_any_company(kernel_device: torch.device, name: str, split_keys: int | None) -> None:
    """Rows around it begin at other blocks, end in other splits and have larger logits."""
    model = MODELS[name]
    cache = filled_cache(model, [Rows(start=0, size=100, slots=slots) for slots in (LONG, OTHER)], torch.float32)
    query = random_queries(model, 1, seed=7)
    lone = [Rows(start=70, size=1, slots=LONG)]
    alone = run(model, lone, query, cache, kernel_device, split_keys=split_keys)[0]
    assert alone.isfinite().all()
    for company, (rows, place, how) in COMPANIES.items():
        queries = random_queries(model, sum(own.size for own in rows), seed=8) * 3
        queries[place] = query[0]
        found = run(model, rows, queries, cache, kernel_device, split_keys=split_keys, **how)
        assert torch.equal(found[place], alone), company


def test_contexts_on_both_sides_of_one_split_have_the_same_bits(kernel_device: torch.device) -> None:
    """Where a launch's contexts fit into one split nothing is merged."""
    model = MODELS["sinks"]
    rows = [Rows(start=40, size=2, slots=in_order(42))]
    cache, queries = filled_cache(model, rows, torch.float32), random_queries(model, 2)
    few, many = (run(model, rows, queries, cache, kernel_device, split_keys=64, max_context=n) for n in (64, 65))
    assert torch.equal(few, many)


@pytest.mark.usefixtures("small_blocks")
@pytest.mark.parametrize("split_keys", [None, 32])
@pytest.mark.parametrize("name", ["plain", "values in keys", "values of two programs"])
def test_a_branch_of_a_tree_has_the_bits_of_a_chain(
    kernel_device: torch.device, name: str, split_keys: int | None
) -> None:
    """Two paths over one prefix; keys of the second lie behind those of the first, out of order."""
    model = MODELS[name]
    chain = in_order(70, 0)
    tree = [
        Rows(start=60, size=5, slots=chain, branch_start=60),
        Rows(start=62, size=3, slots=[*chain[:62], 74, 68, 75], branch_start=62),
    ]
    content = torch.randn(80, model.width, generator=torch.Generator().manual_seed(5))
    cache = content.view(-1, BLOCK_SIZE, model.width)
    queries = random_queries(model, 8)
    found = run(model, tree, queries, cache, kernel_device, split_keys=split_keys)
    for path, rows in zip(tree, (slice(0, 5), slice(5, 8)), strict=True):
        laid_out = torch.full_like(content, torch.nan)
        laid_out[: path.end] = content[list(path.slots[: path.end])]
        straight = Rows(start=path.start, size=path.size, slots=chain)
        laid_out = laid_out.view(cache.shape)
        expected = run(model, [straight], queries[rows], laid_out, kernel_device, split_keys=split_keys)
        assert torch.equal(found[rows], expected)


@pytest.mark.usefixtures("small_blocks")
@pytest.mark.parametrize(
    "name", ["plain", "window", "values in keys", "values in keys, window", "values of two programs"]
)
def test_rows_of_a_tree_share_the_splits_before_it_and_keep_their_bits(
    kernel_device: torch.device, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Trees that begin in the third split, nowhere (its request is absent), and at the border of two."""
    new_empty = torch.Tensor.new_empty

    def filled_with_nan(*args: Any, **kwargs: Any) -> Tensor:
        found = new_empty(*args, **kwargs)
        return found.fill_(torch.nan) if found.is_floating_point() else found

    monkeypatch.setattr(torch.Tensor, "new_empty", filled_with_nan)
    model, num_nodes, split_keys = MODELS[name], 4, 32
    lengths, parents = torch.tensor([71, 0, 32]), torch.tensor([[-1, 0, -1, 1]] * 3)
    num_rows, width = num_nodes + 1, 20  # blocks of a request
    tables = 1 + torch.arange(len(lengths) * width, dtype=torch.int32).view(len(lengths), width)
    places = (lengths.unsqueeze(1) - 1 + torch.arange(num_rows)).clamp(min=0)
    slots = tables.long().gather(1, places // BLOCK_SIZE) * BLOCK_SIZE + places % BLOCK_SIZE
    queries = random_queries(model, len(lengths) * num_rows)
    cache = torch.randn(1 + len(lengths) * width, BLOCK_SIZE, model.width, generator=torch.Generator().manual_seed(5))
    tables[lengths == 0], cache[0] = 0, 0.0  # the null block
    keys = {k: v.to(kernel_device) if isinstance(v, Tensor) else v for k, v in model.keys().items()}
    outputs = []
    for shared_splits in (None, split_keys):
        rows = tree_rows(
            lengths, slots, parents, first=0, offset=-1, depth=3, rows_per_tile=4, split_keys=shared_splits
        )
        num_shared = len(rows.tile_rows) - len(queries)
        assert num_shared == (0 if shared_splits is None else 2 * len(lengths))
        arrays = {
            name: values for name, values in rows._asdict().items() if name not in ("positions", "slots", "predicted")
        }
        arrays["block_tables"] = tables
        segments = PagedSegments(
            **{name: values.to(kernel_device) for name, values in arrays.items()},
            max_context=74,
            max_tile_size=1,
            num_shared_tiles=num_shared,
            segments_per_table=num_rows,
        )
        out = triton_ops.paged_attention(
            queries.to(kernel_device), cache.to(kernel_device), segments, split_keys=split_keys, **keys
        )
        outputs.append(out.cpu())
    assert torch.equal(*outputs) and outputs[0].isfinite().all(), "absent requests compute nothing that spreads"


@pytest.mark.parametrize("split_keys", [None, triton_ops.SPLIT_KEYS])
def test_blocks_of_the_shipped_sizes_keep_both_claims(kernel_device: torch.device, split_keys: int | None) -> None:
    model = Model(num_heads=4, head_dim=32, value_dim=32)
    slots = in_order(1110, 0, seed=4)
    rows = [Rows(start=1095, size=3, slots=slots)]
    cache, queries = filled_cache(model, rows, torch.float32), random_queries(model, 3)
    found = run(model, rows, queries, cache, kernel_device, split_keys=split_keys)
    exact, plain = (dense(model, rows, queries, cache, kind) for kind in (torch.float64, torch.float32))
    assert_close(found, exact, plain)
    last = [Rows(start=1097, size=1, slots=slots)]
    how = {"max_context": 1300, "split_keys": split_keys}
    assert torch.equal(run(model, last, queries[2:], cache, kernel_device, **how)[0], found[2])


def test_launches_of_padding_alone_do_nothing(kernel_device: torch.device) -> None:
    rows, cache = [Rows(start=0, size=0, slots=[0])], torch.zeros(1, BLOCK_SIZE, PLAIN.width)
    how = {"split_keys": 64, "max_context": 65}
    out = run(PLAIN, rows, random_queries(PLAIN, 1), cache, kernel_device, num_padding=2, **how)
    assert out.shape == (1, PLAIN.num_heads * PLAIN.value_dim)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")
@pytest.mark.parametrize("split_keys", [None, triton_ops.SPLIT_KEYS])
@pytest.mark.parametrize(
    "model",
    [
        Model(num_heads=32, num_kv_heads=8, head_dim=128, value_dim=128),
        Model(num_heads=20, head_dim=576, value_dim=512, options={"values_in_keys": True}),
        WIDE,
    ],
    ids=["Llama-3-8B", "GLM-4.7-Flash", "Gemma 4 E2B"],
)
def test_one_row_has_the_bits_it_has_among_1088(model: Model, split_keys: int | None) -> None:
    """In bfloat16: 64 sequences, 17 rows each, contexts of 17 to 8,000 over their own blocks."""
    device = torch.device("cuda")
    rows, used = [], 0
    for start in torch.linspace(0, 7983, 64).long().tolist():
        rows.append(Rows(start=start, size=17, slots=in_order(start + 17, used)))
        used += -(-(start + 17) // BLOCK_SIZE)
    generator = torch.Generator(device).manual_seed(0)
    cache = torch.randn(used, BLOCK_SIZE, model.width, generator=generator, device=device, dtype=torch.bfloat16)
    queries = random_queries(model, 17 * 64, torch.bfloat16)
    together = run(model, rows, queries, cache, device, split_keys=split_keys, max_context=8192)
    for index in (0, 5, 31, 63):
        for place in (0, 7, 16):
            own, launch_row = rows[index], 17 * index + place
            lone = [Rows(start=own.start + place, size=1, slots=own.slots)]
            found = run(model, lone, queries[launch_row : launch_row + 1], cache, device, split_keys=split_keys)
            assert torch.equal(found[0], together[launch_row]), (own.start, place)
    exact, plain = (
        dense(model, rows[:8], queries[: 17 * 8], cache.cpu(), kind) for kind in (torch.float64, torch.bfloat16)
    )
    assert_close(together[: 17 * 8], exact, plain)


@pytest.mark.parametrize(
    ("heads", "element_size", "kilobytes", "found"),
    [
        # (head_dim, value_dim, values_in_keys), and BLOCK_N, num_warps and num_stages
        *(((576, 512, True), 2, *taken) for taken in ((227, (32, 8, 3)), (163, (32, 8, 3)), (99, (16, 8, 2)))),
        *(((512, 512, False), 2, *taken) for taken in ((227, (16, 4, 4)), (163, (16, 4, 4)), (99, (16, 4, 2)))),
        *(((512, 512, False), 4, *taken) for taken in ((227, (16, 16, 1)), (163, (16, 16, 1)))),
        *(((256, 256, False), 2, *taken) for taken in ((227, (32, 4, 3)), (163, (32, 4, 3)), (99, (16, 4, 3)))),
        *(((256, 256, False), 4, *taken) for taken in ((227, (16, 16, 3)), (163, (16, 16, 3)), (99, (16, 16, 1)))),
        *(((128, 128, False), 2, *taken) for taken in ((227, (64, 4, 3)), (163, (64, 4, 3)), (99, (64, 4, 3)))),
    ],
)
def test_as_many_keys_are_taken_at_a_time_as_a_gpu_has_registers_and_memory_for(
    heads: tuple[int, int, bool], element_size: int, kilobytes: int, found: tuple[int, int, int]
) -> None:
    """tests/aot/attention.py has what these take."""
    *dims, values_in_keys = heads
    blocks = triton_ops.blocks_of(*dims, values_in_keys=values_in_keys)
    assert options_of(blocks, element_size, values_in_keys=values_in_keys, kilobytes=kilobytes) == found
    # Of 8 bits as many keys at a time, expanded one step after another, and more of them on their way.
    of_8_bits = options_of(blocks, element_size, values_in_keys=values_in_keys, kilobytes=kilobytes, is_fp8=True)
    assert of_8_bits[:2] == found[:2] and found[2] <= of_8_bits[2] <= 4


def options_of(
    blocks: dict[str, int], element_size: int, *, values_in_keys: bool, kilobytes: int, is_fp8: bool = False
) -> tuple[int, int, int]:
    options = triton_ops.launch_options(
        blocks, element_size, values_in_keys=values_in_keys, is_fp8=is_fp8, capacity=kilobytes * 1024
    )
    return options["BLOCK_N"], options["num_warps"], options["num_stages"]


@pytest.mark.parametrize(("heads", "kilobytes", "needed"), [((576, 512, True), 163, 180), ((512, 512, False), 99, 160)])
def test_keys_that_do_not_fit_the_memory_of_a_gpu_are_told(
    heads: tuple[int, int, bool], kilobytes: int, needed: int
) -> None:
    *dims, values_in_keys = heads
    blocks = triton_ops.blocks_of(*dims, values_in_keys=values_in_keys)
    with pytest.raises(ValueError, match=f"takes {needed} KB of shared memory, and this GPU has {kilobytes} KB"):
        options_of(blocks, 4, values_in_keys=values_in_keys, kilobytes=kilobytes)
