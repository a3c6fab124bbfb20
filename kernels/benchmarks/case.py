"""What the benchmark of an op consists of, and the checks that have to pass before a time counts.

A module of this package has `cases(setting)`. A case prepares its tensors when its turn comes; the resulting work
checks itself and offers the calls to time. Tolerances are derived where they are used; none is picked by hand.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

Call = Callable[[], object]

VOCAB_SIZE = 128_256  # Llama 3's
LARGEST_SEED = 2**63 - 1
CACHES_OF_COPIES = 8  # copies of what comes from memory together fill so many second-level caches
MOST_COPIES = 128
COMPANY = 17  # rows that one row is compared among


class CheckFailed(Exception):
    """The kernel is wrong; the message says in what."""


@dataclass(frozen=True, kw_only=True)
class Setting:
    """Where and at which size the cases are built."""

    device: torch.device  # cpu: the kernels are interpreted
    dtype: torch.dtype
    is_small: bool = False  # shapes that the interpreter can do
    cache_bytes: int = 0  # of the device's second-level cache; 0: nothing is timed, no copies

    @property
    def is_interpreted(self) -> bool:
        return self.device.type == "cpu"

    def normal(self, *shape: int, seed: int, dtype: torch.dtype | None = None) -> Tensor:
        generator = torch.Generator(self.device).manual_seed(seed)
        return torch.randn(shape, generator=generator, device=self.device, dtype=dtype or self.dtype)

    def integers(self, low: int, high: int, *shape: int, seed: int) -> Tensor:
        generator = torch.Generator(self.device).manual_seed(seed)
        return torch.randint(low, high, shape, generator=generator, device=self.device)

    def num_copies(self, num_bytes: int) -> int:
        return min(max(1, -(-CACHES_OF_COPIES * self.cache_bytes // num_bytes)), MOST_COPIES)

    def copies(self, num_bytes: int, *tensors: Tensor) -> list[tuple[Tensor, ...]]:
        """The tensors and copies of them: calls that take one after the other find none in the second-level cache.

        num_bytes: of the tensors, what a call touches. Where that is so little that all copies fit, it is found there,
        as in an engine whose launch before has just written it; comes_from says which it is.
        """
        others = range(self.num_copies(num_bytes) - 1)
        return [tensors, *(tuple(tensor.clone() for tensor in tensors) for _ in others)]

    def comes_from(self, num_bytes: int) -> str:
        touched = self.num_copies(num_bytes) * num_bytes
        return "memory" if touched >= CACHES_OF_COPIES * self.cache_bytes else "L2"


@dataclass(frozen=True, kw_only=True)
class Work:
    check: Callable[[], list[str]]  # names of the checks that passed; raises CheckFailed
    calls: Sequence[Call]  # the same call on each copy of its inputs
    num_bytes: int  # that one call must move at least: inputs read once, outputs written once
    comes_from: str  # where calls in turn find their inputs: "memory" or "L2"
    torch_calls: Sequence[Call] = ()  # torch's own way, on the same inputs
    goal_us: float | None = None


@dataclass(frozen=True, kw_only=True)
class Case:
    op: str
    label: str
    dtype: str
    prepare: Callable[[], Work] = field(repr=False)


def name_of(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def check_error(found: Tensor, by_torch: Tensor, exact: Tensor) -> str:
    """At most twice the error of torch in the same dtype, and a rounding of the largest value; exact: float64."""
    if found.shape != exact.shape:
        raise CheckFailed(f"shape {tuple(found.shape)}, not {tuple(exact.shape)}")
    largest = exact.abs().max().to(found.dtype).cpu()  # torch's CUDA nextafter knows fewer dtypes
    ulp = float(torch.nextafter(largest, torch.full_like(largest, float("inf"))) - largest)
    error, error_of_torch = (float((values.double() - exact).abs().max()) for values in (found, by_torch))
    limit = 2 * error_of_torch + ulp
    if not error <= limit:  # a NaN is no small error
        raise CheckFailed(f"error {error:.3g} against float64, limit {limit:.3g}")
    return "accuracy"


def check_equal(what: str, found: Tensor, wanted: Tensor) -> None:
    if not torch.equal(found, wanted):
        if found.shape != wanted.shape:
            raise CheckFailed(f"{what}: shape {tuple(found.shape)}, not {tuple(wanted.shape)}")
        different = found != wanted
        raise CheckFailed(f"{what}: {int(different.sum())} of {different.numel()} differ from the reference")


def check_row_bits(op: Callable[[slice], Tensor], num_rows: int) -> str:
    """The first, middle and last row of op(rows) have the bits of the same row alone; num_rows > 1."""
    together = op(slice(0, num_rows))
    for place in (0, num_rows // 2, num_rows - 1):
        if not torch.equal(op(slice(place, place + 1))[0], together[place]):
            raise CheckFailed(f"row {place} has other bits among {num_rows} rows than alone")
    return "row bits"


def check_draws(token_ids: Tensor, scores: Tensor, uncertainty: Tensor) -> str:
    """No token beats the drawn one by more than the scores [num_rows, vocab] may be off, each by its uncertainty."""
    if not bool(((token_ids >= 0) & (token_ids < scores.shape[1])).all()):
        raise CheckFailed("tokens outside the vocabulary")
    drawn = token_ids.unsqueeze(1)
    highest = (scores + uncertainty).gather(1, drawn).squeeze(1)
    wrong = ~(highest >= (scores - uncertainty).amax(dim=1))
    if bool(wrong.any()):
        raise CheckFailed(f"{int(wrong.sum())} of {len(wrong)} draws are not the reference's")
    return "draws"


def noise_uncertainty(noise: Tensor, scores: Tensor) -> Tensor:
    """How far a kernel's float32 score and the reference's may be apart, [num_rows, vocab].

    Noise: 2**-22 * max(1, |g|) by kernels/philox.py, and the reference's own rounding; then a rounding of each sum.
    """
    return noise.abs().clamp(min=1.0) * 2.0**-21 + scores.abs().nan_to_num(posinf=0.0) * 2.0**-23
