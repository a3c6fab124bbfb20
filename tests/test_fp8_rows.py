"""Keys and values in 8 bits: what is kept of a number, and attention to it against the same numbers kept whole."""

from __future__ import annotations

from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from kernels.cpu import latent_rows, rope
from kernels.cpu import paged_attention as on_cpu
from kernels.reference.fp8_rows import FP8, as_fp8, in_dtype_of_cache
from kernels.reference.rope import RopeTable
from tests.seeded import randn
from tests.test_cpu_kernels import MODELS as MODELS_ON_CPU
from tests.test_cpu_kernels import attention, trees, whoever_shares
from tests.test_paged_attention_kernel import (  # noqa: F401 - fixtures
    FORMS,
    MODELS,
    RAGGED,
    Model,
    filled_cache,
    products_of_fixed_order,
    random_queries,
    run,
    small_blocks,
)
from tests.test_rope_kernel import POSITIONS, SLOTS, STORING, Shape, angles, norms, rows_of

triton_rope = pytest.importorskip("kernels.rope")
triton_latents = pytest.importorskip("kernels.latent_rows")

BACKENDS = {"a CPU": (rope, latent_rows), "a GPU": (triton_rope, triton_latents)}
SCALES = (0.013, 0.7)
NUM_BLOCKS, BLOCK_SIZE = 6, 4


@pytest.fixture(params=BACKENDS)
def backend(request: pytest.FixtureRequest, kernel_device: torch.device) -> tuple[ModuleType, torch.device]:
    """(rope, latent_rows), and where they compute."""
    return BACKENDS[request.param], torch.device("cpu") if request.param == "a CPU" else kernel_device


def octets(kept: Tensor) -> Tensor:
    """Whose NaN is equal to itself."""
    return kept.cpu().view(torch.uint8)


# --- what is kept ---------------------------------------------------------------------------------------------------


def numbers() -> Tensor:
    """[rows, 64] float32: every bfloat16, and what lies half way between neighbours of 8 bits and on both sides."""
    every = torch.arange(1 << 16, dtype=torch.int32).to(torch.int16).view(torch.bfloat16).float()
    kept = torch.arange(256, dtype=torch.uint8).view(FP8).float()
    kept = kept[kept.isfinite()].sort().values
    middles = (kept[1:] + kept[:-1]) / 2
    around = [middles.nextafter(torch.full_like(middles, end)) for end in (-torch.inf, torch.inf)]
    found = torch.cat((every, kept, middles, *around))
    return torch.nn.functional.pad(found, (0, -len(found) % 64)).view(-1, 64)


def test_a_number_is_rounded_to_its_nearest_and_none_is_lost() -> None:
    """Ties go to even codes, as everywhere in IEEE 754; what would overflow is the largest."""
    of_8_bits = torch.arange(127, dtype=torch.uint8).view(FP8).double()  # in their order
    given = numbers().flatten().double()
    given = given[given.isfinite()]
    distances = (given.abs().clamp(max=448.0).unsqueeze(1) - of_8_bits).abs()
    nearest = distances == distances.min(dim=1, keepdim=True).values
    even = nearest & ((torch.arange(127) % 2 == 0) | (nearest.sum(dim=1, keepdim=True) == 1))
    expected = of_8_bits[even.int().argmax(dim=1)] * given.sign()
    assert torch.equal(as_fp8(given.float(), 1.0).double(), expected)


@pytest.mark.parametrize("scale", [1.0, SCALES[0]])
def test_every_backend_keeps_the_same_of_a_number(backend: Any, scale: float) -> None:
    """Values, which nothing turns, go to the cache as they are."""
    (rope, _), device = backend
    values = numbers()
    rows = torch.cat((torch.zeros_like(values), values), dim=1).to(device)
    places = torch.arange(len(rows), device=device)
    table = RopeTable(*angles(64), 1, 0).compact.to(device)
    cache = torch.zeros(-(-len(rows) // 16) + 1, 16, 128, dtype=torch.uint8, device=device).view(FP8)
    shape = {"num_heads": 0, "num_kv_heads": 1, "head_dim": 64, "kv_scales": (1.0, scale)}
    with np.errstate(invalid="ignore", over="ignore"):  # of NaN and infinity under the interpreter
        rope.rope_and_write(rows, table, torch.zeros_like(places), places + 16, cache, **shape)
    found = cache.flatten(0, 1)[16 : 16 + len(rows), 64:]
    expected = as_fp8(values, scale)
    assert torch.equal(found.float().cpu().isnan(), expected.float().isnan())
    assert torch.equal(octets(found)[~expected.float().isnan()], octets(expected)[~expected.float().isnan()])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("shape", STORING, ids=str)
@pytest.mark.parametrize("norms_values", [False, True])
def test_heads_are_kept_as_they_would_be_whole_and_rounded_once_more(
    backend: Any, shape: Shape, dtype: torch.dtype, norms_values: bool
) -> None:
    (rope, _), device = backend
    skip_what_no_interpreter_knows(dtype, rope, device)
    weights = {name: own.to(device) for name, own in norms(shape, dtype, norms_values=norms_values).items()}
    table = RopeTable(*angles(shape.head_dim), 1, 0).compact.to(device)
    width = shape.width - shape.queries
    queries, caches = [], []
    for kept in (dtype, FP8):
        cache = torch.zeros(NUM_BLOCKS, BLOCK_SIZE, width, dtype=kept, device=device)
        rows = rows_of(shape, dtype).to(device)
        places = POSITIONS.to(device), SLOTS.to(device)
        keys = {**shape.sizes(), **weights, **({"kv_scales": SCALES} if kept == FP8 else {})}
        queries.append(rope.rope_and_write(rows, table, *places, cache, **keys).clone())
        caches.append(cache.flatten(0, 1)[SLOTS.to(device)])
    expected = in_dtype_of_cache(caches[0], FP8, SCALES, values_from=width // 2)
    assert torch.equal(*queries) and torch.equal(octets(caches[1]), octets(expected))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_latents_are_kept_as_they_would_be_whole_and_rounded_once_more(backend: Any, dtype: torch.dtype) -> None:
    (_, latent_rows), device = backend
    skip_what_no_interpreter_knows(dtype, latent_rows, device)
    num_rows, num_heads, unturned, dim, rank = 5, 3, 10, 8, 24
    queries, latents = randn(num_rows, num_heads, unturned + dim, dtype=dtype), randn(num_rows, rank + dim, dtype=dtype)
    table, norm = RopeTable(*angles(dim), 1, 0).compact.to(device), randn(rank, dtype=dtype, seed=2).to(device)
    caches, turned = [], []
    for kept in (dtype, FP8):
        cache = torch.zeros(NUM_BLOCKS, BLOCK_SIZE, rank + dim, dtype=kept, device=device)
        turned.append(torch.zeros(num_rows, num_heads, dim, dtype=dtype, device=device))
        where = table, POSITIONS.to(device), SLOTS.to(device), cache, turned[-1]
        eps = torch.tensor(1e-6, device=device)
        given = queries.to(device), latents.to(device)
        scale = {"kv_scale": SCALES[0]} if kept == FP8 else {}
        latent_rows.rotate_and_store_latents(*given, *where, norm=norm, eps=eps, **scale)
        caches.append(cache.flatten(0, 1)[SLOTS.to(device)])
    assert torch.equal(*turned) and torch.equal(octets(caches[1]), octets(as_fp8(caches[0], SCALES[0])))


def skip_what_no_interpreter_knows(dtype: torch.dtype, op: ModuleType, device: torch.device) -> None:
    if dtype == torch.bfloat16 and device.type == "cpu" and "cpu" not in op.__name__:
        pytest.skip("Triton's interpreter knows no constants of bfloat16")


# --- attention ------------------------------------------------------------------------------------------------------


@pytest.fixture(params=[torch.float32, torch.bfloat16, torch.float16, "bfloat16 in lanes"], ids=str)
def dtype(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> torch.dtype:
    if isinstance(request.param, torch.dtype):
        return request.param
    monkeypatch.setattr(on_cpu, "has_amx", lambda: False)
    return torch.bfloat16


WIDE_HEADS = ("heads of 64, window", "values narrower than keys")


def skip_what_others_show(name: str, dtype: torch.dtype, request: pytest.FixtureRequest) -> None:
    if name in WIDE_HEADS and request.node.callspec.params["dtype"] != torch.bfloat16:
        pytest.skip("a kernel more to be compiled, which differs from others by what these show")


@pytest.mark.parametrize("name", ["three heads a group", "heads of 10", "sinks, window", "softcap", *WIDE_HEADS])
def test_a_cpu_attends_to_them_as_to_the_same_numbers_kept_whole(
    name: str, dtype: torch.dtype, request: pytest.FixtureRequest
) -> None:
    skip_what_others_show(name, dtype, request)
    model = MODELS_ON_CPU[name]
    cache = as_fp8(filled_cache(model, RAGGED, torch.float32), 1.0)
    queries = random_queries(model, sum(own.size for own in RAGGED), dtype)
    expected = attention(model, RAGGED, queries, cache.to(dtype))
    assert torch.equal(whoever_shares(lambda: attention(model, RAGGED, queries, cache)), expected)


@pytest.mark.parametrize("name", ["three heads a group", "heads of 10", *WIDE_HEADS])
def test_a_cpus_rows_of_trees_lay_their_own_paths_out_behind_what_they_share(
    name: str, dtype: torch.dtype, request: pytest.FixtureRequest
) -> None:
    skip_what_others_show(name, dtype, request)
    model = MODELS_ON_CPU[name]
    rows, blocks, segments, generator = trees(model, 0)
    cache = as_fp8(torch.randn(blocks.numel(), BLOCK_SIZE, model.width, generator=generator), 1.0)
    queries = random_queries(model, len(rows.positions), dtype)
    found, expected = (
        on_cpu.paged_attention(queries, own, segments, **model.keys()) for own in (cache, cache.to(dtype))
    )
    assert torch.equal(found, expected)


@pytest.mark.usefixtures("small_blocks", "products_of_fixed_order")
@pytest.mark.parametrize("kind", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize(
    ("name", "split_keys"),
    [
        (name, split_keys)
        for name, split_keys in FORMS
        if name in ("plain", "one head a group, values narrower", "sinks, window", "softcap")
        or name in ("values in keys, window", "values are keys", "values of two programs, window")
    ],
)
def test_a_gpu_attends_to_them_as_to_the_same_numbers_kept_whole(
    kernel_device: torch.device, name: str, split_keys: int | None, kind: torch.dtype
) -> None:
    skip_what_no_interpreter_knows(kind, triton_rope, kernel_device)
    model = MODELS[name]
    cache = as_fp8(filled_cache(model, RAGGED, torch.float32), 1.0)
    queries = random_queries(model, sum(own.size for own in RAGGED), kind)
    found, expected = (
        run(model, RAGGED, queries, own, kernel_device, split_keys=split_keys) for own in (cache, cache.to(kind))
    )
    assert torch.equal(found, expected)


@pytest.mark.usefixtures("small_blocks", "products_of_fixed_order")
@pytest.mark.parametrize(
    ("where", "options"),
    [("a CPU", {}), ("a CPU", {"softcap": 2.0}), (None, {}), (None, {"softcap": 2.0}), (32, {})],
    ids=["a CPU", "a CPU, softcap", "a GPU, whole", "a GPU, softcap", "a GPU, split"],
)
def test_scales_multiply_what_is_kept(
    kernel_device: torch.device, where: str | int | None, options: dict[str, Any]
) -> None:
    """By powers of two, which round nothing: so these are the bits of what they stand for."""

    def attend(model: Model, queries: Tensor, cache: Tensor) -> Tensor:
        if where == "a CPU":
            return attention(model, RAGGED, queries, cache)
        return run(model, RAGGED, queries, cache, kernel_device, split_keys=where)

    scales = (0.125, 4.0)
    plain = Model(num_heads=3, options=options)
    scaled = Model(num_heads=3, options={**options, "kv_scales": scales})
    cache = as_fp8(filled_cache(plain, RAGGED, torch.float32), 1.0)
    queries = random_queries(plain, sum(own.size for own in RAGGED))
    whole = cache.float()
    whole[..., :16] *= scales[0]
    whole[..., 16:] *= scales[1]
    assert torch.equal(attend(scaled, queries, cache), attend(plain, queries, whole))
