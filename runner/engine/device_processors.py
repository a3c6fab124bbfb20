"""What requests of whole steps ask to change in their logits: masks, biases and penalties, on the device.

A table has a row for each place of the batch, and is made when a request first asks for what it holds. The host fills
the rows when whole steps begin, and those of grammars before each step; the steps count on what they commit. Same
numbers, and so same bits, as runner/engine/sampling_rows.py has for steps in parts.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from kernels.reference.rejection import Verified
from runner.engine.bad_words import tail_of
from runner.engine.request import Request
from runner.engine.sampling_rows import BitmaskRows
from runner.engine.step_operations import mask_and_penalise
from runner.engine.upload import to_device

UNCHANGED = -0.0  # added to a logit, leaves its very bits
EVERYTHING = -1  # a word of a bitmask that allows all of its tokens


@dataclass(frozen=True, kw_only=True)
class ProcessorFlags:
    """Which tables the requests of a batch need, and how wide they are.

    Steps of other flags are captured anew, so there are few: where a request asks for anything, there are tables of
    everything but bad words and grammars, and widths are rounded far up.
    """

    num_ending: int  # eos and stop tokens that wait for min_tokens: room for those of any request
    num_bad_words: int  # likewise
    longest_beginning: int  # tokens before a bad word's last
    grammars: bool

    @classmethod
    def of(cls, requests: Sequence[Request], eos_token_ids: tuple[int, ...]) -> ProcessorFlags | None:
        """None where nobody asks for anything."""
        params = [request.sampling_params for request in requests]
        if not any(p.changes_logits for p in params):
            return None
        words = [word for request in requests for word in request.bad_words_token_ids]
        return cls(
            num_ending=_rounded(max(len({*eos_token_ids, *p.stop_token_ids}) for p in params), 8),
            num_bad_words=_rounded(max(len(request.bad_words_token_ids) for request in requests), 8) if words else 0,
            longest_beginning=_rounded(max(len(word) - 1 for word in words), 4) if words else 0,
            grammars=any(p.structured_outputs is not None for p in params),
        )


def _rounded(number: int, base: int) -> int:
    """The next power of the base, but for 1."""
    power = base
    while power < number:
        power *= base
    return power


@dataclass(frozen=True, kw_only=True)
class BadWordTables:
    beginnings: Tensor  # [count, words, longest] int64: what stands before a word's last token, -1 in front
    last_token_ids: Tensor  # [count, words] int64; -1: no word
    tails: Tensor  # [count, longest] int64: the output's last tokens
    places: Tensor  # [longest] int64: 0, 1, ...

    def forbidden(self, ancestors: Tensor | None, num_rows: int) -> Tensor:
        """[num_rows, words] int64: last tokens of words whose others stand before a row; -1: of no word."""
        (count, longest), rows_of_each = self.tails.shape, num_rows // len(self.tails)
        said = self.tails.unsqueeze(1).expand(-1, rows_of_each, -1).reshape(num_rows, longest)
        if ancestors is not None:
            said = _behind(torch.cat((said, ancestors), dim=1), (ancestors >= 0).sum(dim=1), self.places)
        is_said = said.view(count, rows_of_each, 1, longest) == self.beginnings.unsqueeze(1)
        applies = ((self.beginnings < 0).unsqueeze(1) | is_said).all(dim=-1)
        return torch.where(applies, self.last_token_ids.unsqueeze(1), -1).view(num_rows, -1)

    def follow(self, verified: Verified) -> None:
        said = torch.cat((self.tails, verified.token_ids), dim=1)
        self.tails.copy_(_behind(said, verified.num_accepted_tokens + 1, self.places))


def _behind(token_ids: Tensor, starts: Tensor, places: Tensor) -> Tensor:
    """As many tokens of each row as there are places, from starts [num_rows] on."""
    return token_ids.gather(1, starts.unsqueeze(1) + places)


@dataclass(frozen=True, kw_only=True)
class Processors:
    """Of a batch's requests: views, the same ones in every step."""

    bias: Tensor  # [count, vocab] float32
    said: Tensor  # [count, vocab] int32, as kernels/reference/mask_and_penalise.py has it
    penalties: Tensor  # [count, 3] float32
    ending: Tensor  # [count, most] int64: eos and stop tokens, -1 behind them
    ends_from: Tensor  # [count] int64: the first position where they may stand
    bad_words: BadWordTables | None  # None: nobody has any
    bitmask: Tensor | None  # [count * num_rows, words] int32, of the rows of a verification; None: nobody has a grammar

    def apply(self, logits: Tensor, positions: Tensor, ancestors: Tensor | None) -> Tensor:
        """What mask_and_penalise of runner/engine/sampling.py makes of the rows; never changes its input.

        Args:
            logits: [num_rows, vocab] float32, as many rows of each request.
            positions: [num_rows] int64, that the rows predict; or [count], where all of a request's predict the same.
            ancestors: [num_rows, depth] int64, drafts before what a row predicts, -1 behind them; None: there are none.
        """
        count, most = self.ending.shape
        is_early = positions.view(count, -1) < self.ends_from.unsqueeze(1)
        early = torch.where(is_early.unsqueeze(2), self.ending.unsqueeze(1), -1)
        forbidden = early.expand(-1, len(logits) // count, -1).reshape(-1, most)
        if self.bad_words is not None:
            forbidden = torch.cat((forbidden, self.bad_words.forbidden(ancestors, len(logits))), dim=1)
        return mask_and_penalise(
            logits,
            bias=self.bias,
            forbidden=forbidden.contiguous(),
            bitmask=self.bitmask,
            said=self.said,
            penalties=self.penalties,
            ancestors=None if ancestors is None else ancestors.contiguous(),
        )


class DeviceProcessors:
    def __init__(self, *, capacity: int, vocab_size: int, eos_token_ids: tuple[int, ...], device: torch.device) -> None:
        self.capacity, self.vocab_size, self.eos_token_ids, self.device = capacity, vocab_size, eos_token_ids, device
        self._tables: dict[tuple[str, tuple[int, ...]], Tensor] = {}

    def load(self, requests: Sequence[Request], flags: ProcessorFlags) -> None:
        """Fill the first places; the others keep what they have, and nobody looks at them."""
        count, device = len(requests), self.device
        params = [request.sampling_params for request in requests]
        tensors = [request.tensors_on(device, self.vocab_size, self.eos_token_ids) for request in requests]
        bias = self._table("bias", torch.float32, self.vocab_size)[:count].fill_(UNCHANGED)
        said = self._table("said", torch.int32, self.vocab_size)[:count].zero_()
        for place, (request, p, own) in enumerate(zip(requests, params, tensors, strict=True)):
            if p.logit_bias:
                bias[place].index_copy_(0, *own.logit_bias)
            if p.allowed_token_ids is not None:
                bias[place].masked_fill_(~own.is_allowed, float("-inf"))
            if p.has_penalties:
                own.write_said(request.output_token_ids, said[place])
        values = [[p.repetition_penalty, p.frequency_penalty, p.presence_penalty] for p in params]
        self._table("penalties", torch.float32, 3)[:count].copy_(to_device(values, torch.float32, device))
        ending = [_padded([*{*self.eos_token_ids, *p.stop_token_ids}], flags.num_ending) for p in params]
        self._table("ending", torch.int64, flags.num_ending)[:count].copy_(to_device(ending, torch.int64, device))
        ends_from = [request.num_prompt_tokens + request.sampling_params.min_tokens for request in requests]
        self._table("ends_from", torch.int64)[:count].copy_(to_device(ends_from, torch.int64, device))
        if flags.num_bad_words:
            self._load_bad_words(requests, flags)

    def _load_bad_words(self, requests: Sequence[Request], flags: ProcessorFlags) -> None:
        count, words, longest = len(requests), flags.num_bad_words, flags.longest_beginning
        empty = (-1,) * longest
        beginnings, last_token_ids, tails = list[list[tuple[int, ...]]](), list[list[int]](), list[list[int]]()
        for request in requests:
            own = request.bad_words_token_ids
            fronts = [(*empty[len(word) - 1 :], *word[:-1]) for word in own]
            beginnings.append(fronts + [empty] * (words - len(own)))
            last_token_ids.append(_padded([word[-1] for word in own], words))
            tails.append(tail_of(request.output_token_ids, longest))
        tables = self._bad_words(count, flags)
        tables.beginnings.copy_(to_device(beginnings, torch.int64, self.device))
        tables.last_token_ids.copy_(to_device(last_token_ids, torch.int64, self.device))
        tables.tails.copy_(to_device(tails, torch.int64, self.device))

    def put_bitmask(
        self, bitmask: BitmaskRows | None, counts: Sequence[int], places: Sequence[int], num_rows: int
    ) -> None:
        """What grammars allow in this step; everything in rows that `bitmask` does not tell of.

        Args:
            bitmask: of rows request by request, one for each draft and one behind them. None: of no row.
            counts: drafts of each request.
            places: of these requests in the batch.
            num_rows: that every request has.
        """
        table = self._bitmask(num_rows).fill_(EVERYTHING)
        if bitmask is None:
            return
        rows = [place * num_rows + row for place, count in zip(places, counts, strict=True) for row in range(count + 1)]
        index = to_device(rows, torch.int64, self.device)
        if bitmask.row_idx is not None:
            index = index.index_select(0, bitmask.row_idx)
        table.flatten(0, 1).index_copy_(0, index, bitmask.words)

    def _bitmask(self, num_rows: int) -> Tensor:
        return self._table("bitmask", torch.int32, num_rows, -(-self.vocab_size // 32))

    def of_batch(self, count: int, flags: ProcessorFlags | None, num_rows: int) -> Processors | None:
        """Views of the first `count` places; num_rows: of each request in a verification."""
        if flags is None:
            return None
        return Processors(
            bias=self._table("bias", torch.float32, self.vocab_size)[:count],
            said=self._table("said", torch.int32, self.vocab_size)[:count],
            penalties=self._table("penalties", torch.float32, 3)[:count],
            ending=self._table("ending", torch.int64, flags.num_ending)[:count],
            ends_from=self._table("ends_from", torch.int64)[:count],
            bad_words=self._bad_words(count, flags) if flags.num_bad_words else None,
            bitmask=self._bitmask(num_rows)[:count].flatten(0, 1) if flags.grammars else None,
        )

    def _bad_words(self, count: int, flags: ProcessorFlags) -> BadWordTables:
        words, longest = flags.num_bad_words, flags.longest_beginning
        return BadWordTables(
            beginnings=self._table("beginnings", torch.int64, words, longest)[:count],
            last_token_ids=self._table("last_token_ids", torch.int64, words)[:count],
            tails=self._table("tails", torch.int64, longest)[:count],
            places=self._table("places", torch.int64, longest)[0],
        )

    def _table(self, name: str, dtype: torch.dtype, *widths: int) -> Tensor:
        """[capacity, *widths]; captured steps go on reading it where it is."""
        if (name, widths) not in self._tables:
            with torch.inference_mode(False):  # steps change it, whatever mode they are in
                table = torch.zeros(self.capacity, *widths, dtype=dtype, device=self.device)
                if name == "places":
                    table.copy_(torch.arange(widths[0], device=self.device))
            self._tables[name, widths] = table
        return self._tables[name, widths]


def _padded(token_ids: list[int], width: int) -> list[int]:
    return [*token_ids, *[-1] * (width - len(token_ids))]
