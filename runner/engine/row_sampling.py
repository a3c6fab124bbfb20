"""The sampling parameters of logits rows as kernels take them: a value a row, None where no row asks for it.

Logits come as mask_and_penalise leaves them. Nothing is read back to the host.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from torch import Tensor

from kernels.reference.philox import Stream
from runner.engine.backend import runs_kernels

if TYPE_CHECKING:
    from kernels.reference.top_candidates import Candidates
    from kernels.truncation import TruncatedRows

# A greedy target says its likeliest token, so a drafter's likeliest one is right more often than its probability says:
# trees of greedy rows grow by the squares of probabilities, normalised (measured: proposers/methods.md, Trees).
GREEDY_SHARPNESS = 2


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
    def _parameters(self) -> dict[str, Any]:
        return {
            "is_greedy": self.is_greedy,
            "temperatures": self.temperatures,
            "min_p": self.min_p,
            "top_k": self.top_k,
            "top_p": self.top_p,
        }

    def draw(
        self,
        logits: Tensor,
        stream: Stream = Stream.TARGET,
        token_ids: Tensor | None = None,
        draft_steps: Tensor | None = None,
    ) -> Tensor:
        """A token for each row of logits [num_rows, vocab] float32: [num_rows] int64, -1 for padding.

        token_ids: [vocab] int64, the token of each column of a part of the vocabulary; None: a column's number is it.
        draft_steps: [num_rows] int64, a key of the noise; None = 0.
        """
        if self.all_greedy:
            return self.argmax(logits, token_ids)
        if runs_kernels(logits):
            from kernels.sampling import sample

            return sample(
                logits,
                self.seeds,
                self.positions,
                stream=int(stream),
                draft_steps=draft_steps,
                token_ids=token_ids,
                **self._parameters,
            )
        from kernels.cpu.sampling import sample as on_cpu

        temperatures = self.temperatures
        if self.has_cuts:
            logits, temperatures = self.processed(logits), None
        return on_cpu(
            logits,
            self.seeds,
            self.positions,
            stream=int(stream),
            draft_steps=draft_steps,
            is_greedy=self.is_greedy,
            temperatures=temperatures,
            token_ids=token_ids,
        )

    def argmax(self, logits: Tensor, token_ids: Tensor | None = None) -> Tensor:
        """`draw` of greedy rows, whatever these are."""
        if runs_kernels(logits):
            from kernels.sampling import greedy

            return greedy(logits, self.positions, token_ids)
        from kernels.cpu.sampling import greedy as on_cpu

        return on_cpu(logits, self.positions, token_ids)

    def truncated(self, logits: Tensor, *, need_mass: bool = True) -> TruncatedRows:
        """The rows as min_p, top_k and top_p truncate them, and the mass that normalises each. Of Triton's kernels."""
        from kernels.truncation import truncate_rows

        assert not self.all_greedy, "greedy rows are not truncated"
        return truncate_rows(logits, self.positions, need_mass=need_mass, **self._parameters)

    def candidates(
        self, logits: Tensor, width: int, stream: Stream | None, token_ids: Tensor | None = None
    ) -> Candidates:
        """The `width` tokens that come first for each row, in the order of draws without replacement from the stream.

        stream: None, and where all rows are greedy: by probability, nothing is drawn. logits: [num_rows * n, vocab]
        float32, n rows that share the parameters of one, whose positions must not be negative. token_ids: see `draw`.
        Log-probabilities are what trees grow by: of greedy rows GREEDY_SHARPNESS times as sharp as the drafter's.
        """
        sharpness = GREEDY_SHARPNESS if self.all_greedy else 1
        if self.is_greedy is not None:
            logits = sharpened(logits, self.is_greedy)
        is_drawn = stream is not None and not self.all_greedy
        if not runs_kernels(logits):
            return self._candidates_on_cpu(logits, width, stream if is_drawn else None, token_ids, sharpness)
        from kernels.top_candidates import top_candidates

        cuts = None
        if self.has_cuts:
            cuts = self._each(len(logits) // len(self.positions)).truncated(logits, need_mass=False).cuts
        noise = (self.seeds, self.positions) if is_drawn else ()
        return top_candidates(
            logits,
            width,
            *noise,
            stream=int(stream or 0),
            sharpness=sharpness,
            is_greedy=self.is_greedy,
            temperatures=self.temperatures,
            cuts=cuts,
            token_ids=token_ids,
        )

    def _candidates_on_cpu(
        self, logits: Tensor, width: int, stream: Stream | None, token_ids: Tensor | None, sharpness: int
    ) -> Candidates:
        from kernels.cpu.perturb import perturb
        from kernels.cpu.top_candidates import top_candidates

        scores = self.processed(logits)
        if stream is not None:
            shared = {"token_ids": token_ids, "is_greedy": self.is_greedy}
            scores = perturb(scores, self.seeds, self.positions, stream=int(stream), **shared)
        return top_candidates(scores, width, token_ids, sharpness=sharpness)

    @property
    def has_cuts(self) -> bool:
        return self.min_p is not None or self.top_k is not None or self.top_p is not None

    def _each(self, repeats: int) -> RowSampling:
        """Each row so many times, in turn (torch's repeat_interleave may wait for the device)."""
        rows: dict[str, Any] = {"seeds": self.seeds, "positions": self.positions, **self._parameters}
        own = {name: row.unsqueeze(1).expand(-1, repeats).flatten() for name, row in rows.items() if row is not None}
        own = {name: row.contiguous() for name, row in own.items()}  # those of one request are a view
        return replace(self, **own)

    def processed(self, logits: Tensor) -> Tensor:
        """Float32 logits to sample from: by their softmax, or by their argmax in a greedy row."""
        if not runs_kernels(logits):
            from kernels.cpu.truncation import truncate

            nothing_asked = self.temperatures is None and not self.has_cuts
            return logits if nothing_asked else truncate(logits, **self._parameters)
        cuts = None
        if self.has_cuts:
            cuts = self.truncated(logits, need_mass=False).cuts
        if self.temperatures is not None:
            logits = logits / self.temperatures.unsqueeze(1)
        # A greedy row's cut does not change its argmax.
        return logits if cuts is None else logits.masked_fill(logits < cuts.unsqueeze(1), float("-inf"))


def sharpened(logits: Tensor, is_greedy: Tensor) -> Tensor:
    """Logits [num_rows * n, vocab], those of greedy rows GREEDY_SHARPNESS times as large; is_greedy: [num_rows]."""
    factors = is_greedy.float().mul(GREEDY_SHARPNESS - 1).add(1).unsqueeze(1)
    return (logits.view(len(is_greedy), -1) * factors).view(logits.shape)
