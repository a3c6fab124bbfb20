"""What the processors of one request need on the device, made once: masks, biases, and counts of what was said.

A request keeps it from its first step until it ends or is preempted. Ids have been checked on admission.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property

import torch
from torch import Tensor

from kernels.reference.mask_and_penalise import PROMPT
from runner.engine.sampling_params import SamplingParams
from runner.engine.upload import to_device


class RequestTensors:
    """Each is made when it is first asked for.

    Args:
        bad_words_token_ids: sequences that the output may not hold.
        eos_token_ids: of the target; they and stop tokens wait for min_tokens.
    """

    def __init__(
        self,
        params: SamplingParams,
        prompt_token_ids: list[int],
        bad_words_token_ids: Sequence[Sequence[int]],
        *,
        vocab_size: int,
        eos_token_ids: tuple[int, ...],
        device: torch.device,
    ) -> None:
        self._params, self._prompt_token_ids, self._bad_words = params, prompt_token_ids, bad_words_token_ids
        self._vocab_size, self._eos_token_ids, self._device = vocab_size, eos_token_ids, device
        self._num_counted = 0  # output tokens that are in the counts

    @cached_property
    def is_allowed(self) -> Tensor:
        """[vocab] bool, of allowed_token_ids."""
        return self._mask(self._params.allowed_token_ids or ())

    @cached_property
    def logit_bias(self) -> tuple[Tensor, Tensor]:
        """(token ids int64, what is added float32), both [num_biased]."""
        bias = self._params.logit_bias
        return self._ids(list(bias)), to_device(list(bias.values()), torch.float32, self._device)

    @cached_property
    def ending_token_ids(self) -> Tensor:
        """[num_ending] int64: eos and stop tokens."""
        return self._ids(list({*self._eos_token_ids, *self._params.stop_token_ids}))

    @cached_property
    def bad_words(self) -> tuple[Tensor, Tensor]:
        """(what stands before a word's last token, with -1 in front of a shorter one; last tokens), int64.

        [num_words, longest word - 1] and [num_words].
        """
        words = self._bad_words
        length = max(map(len, words)) - 1
        beginnings = [[-1] * (length - len(word) + 1) + list(word[:-1]) for word in words]
        return self._ids(beginnings), self._ids([word[-1] for word in words])

    @cached_property
    def is_in_prompt(self) -> Tensor:
        """[vocab] bool; False without a repetition penalty, for then the prompt has no say."""
        return self._mask(self._prompt_token_ids if self._params.repetition_penalty != 1.0 else ())

    def output_counts(self, output_token_ids: list[int]) -> Tensor:
        """[vocab] int32: how often each token was said; only those that are new since the last call are counted."""
        new = self._ids(output_token_ids[self._num_counted :])
        self._num_counted = len(output_token_ids)
        if len(new):
            self._counts.index_add_(0, new, torch.ones_like(new, dtype=torch.int32))
        return self._counts

    def write_said(self, output_token_ids: list[int], row: Tensor) -> None:
        """`output_counts`, and PROMPT on top of the prompt's tokens, into row [vocab] int32."""
        torch.add(self.output_counts(output_token_ids), self.is_in_prompt.to(torch.int32), alpha=PROMPT, out=row)

    @cached_property
    def _counts(self) -> Tensor:
        with torch.inference_mode(False):  # a step counts on, whatever mode it is in
            return torch.zeros(self._vocab_size, dtype=torch.int32, device=self._device)

    def _mask(self, token_ids: Sequence[int]) -> Tensor:
        mask = torch.zeros(self._vocab_size, dtype=torch.bool, device=self._device)
        return mask.index_fill_(0, self._ids(token_ids), True)

    def _ids(self, token_ids: Sequence[object]) -> Tensor:
        return to_device(token_ids, torch.int64, self._device)
