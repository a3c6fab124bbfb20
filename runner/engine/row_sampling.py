"""The sampling parameters of logits rows as the Triton kernels take them: a value a row, None where no row asks for it.

Logits come as mask_and_penalise leaves them. Only where kernels run.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from torch import Tensor

from kernels.reference.philox import Stream

if TYPE_CHECKING:
    from kernels.row_laws import RowLaws


@dataclass(frozen=True, kw_only=True)
class RowSampling:
    seeds: Tensor  # [num_rows] int64
    positions: Tensor  # [num_rows] int64: the absolute position that a row predicts; negative: padding
    all_greedy: bool
    is_greedy: Tensor | None = None  # [num_rows] bool; None: no row is, or all_greedy
    temperatures: Tensor | None = None  # [num_rows] float32; None: 1
    min_p: Tensor | None = None  # [num_rows] float32; 0: no cut
    top_k: Tensor | None = None  # [num_rows] int64; 0: no cut
    top_p: Tensor | None = None  # [num_rows] float64; 1: no cut

    @property
    def _law(self) -> dict[str, Any]:
        return {
            "is_greedy": self.is_greedy,
            "temperatures": self.temperatures,
            "min_p": self.min_p,
            "top_k": self.top_k,
            "top_p": self.top_p,
        }

    def draw(self, logits: Tensor, stream: Stream = Stream.TARGET) -> Tensor:
        """A token for each row of logits [num_rows, vocab] float32: [num_rows] int64, -1 for padding."""
        from kernels.sampling import greedy, sample

        if self.all_greedy:
            return greedy(logits, self.positions)
        return sample(logits, self.seeds, self.positions, stream=int(stream), **self._law)

    def laws(self, logits: Tensor, *, need_mass: bool = True) -> RowLaws:
        """The cuts of the rows' laws and what normalises them."""
        from kernels.row_laws import row_laws

        assert not self.all_greedy, "greedy rows have no law"
        return row_laws(logits, self.positions, need_mass=need_mass, **self._law)

    def processed(self, logits: Tensor) -> Tensor:
        """Float32 logits whose softmax is the law to sample; of a greedy row, whose argmax is the token."""
        cuts = None
        if self.min_p is not None or self.top_k is not None or self.top_p is not None:
            cuts = self.laws(logits, need_mass=False).cuts
        if self.temperatures is not None:
            logits = logits / self.temperatures.unsqueeze(1)
        # A greedy row's cut is of no concern to its argmax.
        return logits if cuts is None else logits.masked_fill(logits < cuts.unsqueeze(1), float("-inf"))
