"""Heads that are fed their own output: EAGLE, EAGLE-3, MTP. Training runs the very steps that drafting will run.

Row r of step 1 pairs the target's feature of position r with the embedding of token r + 1 and guesses token r + 2;
it keeps its key at position r. Step s goes on from some of those rows, the anchors: it pairs the row's own output of
step s - 1 with token r + s, at position r + s - 1, and sees the keys of step 1 up to its anchor and its own of the
steps between ("training-time test", EAGLE-3, arXiv 2503.01840).
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Iterator
from itertools import count

import torch
from torch import Tensor

from runner.train.heads.block import DecoderBlock, concat_keys
from runner.train.heads.head import Head, soft_label_loss
from runner.train.heads.states import FrozenTarget, TargetStates


class UnrolledHead(Head):
    def __init__(self, target: FrozenTarget, *, num_steps: int, num_anchors: int, step_decay: float) -> None:
        super().__init__(target)
        self.num_steps, self.num_anchors, self.step_decay = num_steps, num_anchors, step_decay

    @property
    @abstractmethod
    def block(self) -> DecoderBlock: ...

    @abstractmethod
    def features(self, states: TargetStates) -> Tensor:
        """[num_texts, length, hidden]: what step 1 is fed in the place of the head's own output."""

    @abstractmethod
    def block_inputs(self, embeddings: Tensor, hidden: Tensor) -> tuple[Tensor, Tensor]:
        """The attention's input and the residual, from a token's embedding and the step before."""

    @abstractmethod
    def block_output(self, residual: Tensor) -> Tensor:
        """What the next step is fed, from the residual stream after the block."""

    @abstractmethod
    def logits(self, output: Tensor) -> Tensor:
        """[..., draft vocabulary]."""

    def target_probs(self, normed: Tensor) -> Tensor:
        """The target's distribution over the draft vocabulary."""
        return self.target.probs(normed)

    def loss(self, states: TargetStates, generator: torch.Generator) -> Tensor:
        usable = states.length - self.num_steps
        anchors = torch.randperm(usable, generator=generator)[: self.num_anchors].sort().values
        anchors = anchors.to(states.token_ids.device)
        total = torch.zeros((), device=anchors.device)
        probs = self.target_probs(states.normed)
        steps = self.steps(states, anchors, lambda step: states.token_ids[:, anchors + step])
        for step, output in zip(range(1, self.num_steps + 1), steps, strict=False):
            labels = probs[:, 1:] if step == 1 else probs[:, anchors + step]
            total = total + self.step_decay ** (step - 1) * soft_label_loss(self.logits(output), labels)
        return total

    @torch.no_grad()
    def draft(self, states: TargetStates, num_speculative_tokens: int) -> Tensor:
        num_texts, length = states.token_ids.shape
        drafts = states.token_ids.new_zeros(num_texts, length, num_speculative_tokens)
        anchors = torch.arange(length - 1, device=states.token_ids.device)
        steps = self.steps(states, anchors, lambda step: drafts[:, 1:, step - 2])
        for step, output in zip(range(num_speculative_tokens), steps, strict=False):
            drafts[:, 1:, step] = self.token_ids(self.logits(output).argmax(dim=-1))
        return drafts

    def token_ids(self, draft_ids: Tensor) -> Tensor:
        """Target ids of ids in the draft vocabulary."""
        return draft_ids

    def steps(self, states: TargetStates, anchors: Tensor, tokens_of_step: Callable[[int], Tensor]) -> Iterator[Tensor]:
        """Yields the output of step 1 for every row but the last, then of steps 2, 3, ... for the anchors' rows.

        `tokens_of_step(step)` names the tokens [num_texts, num_anchors] that a step from 2 on is fed.
        """
        attention = self.block.self_attn
        rows = torch.arange(states.length - 1, device=anchors.device)
        inputs, residual = self.block_inputs(self.target.embed(states.token_ids[:, 1:]), self.features(states)[:, :-1])
        keys = attention.keys_values(inputs, rows)
        output = self.block_output(self.block(inputs, residual, rows, keys, None))
        yield output
        output = output[:, anchors]
        mask = rows <= anchors.unsqueeze(1)  # [num_anchors, num_rows]
        own = torch.eye(len(anchors), dtype=torch.bool, device=anchors.device)
        for step in count(2):
            inputs, residual = self.block_inputs(self.target.embed(tokens_of_step(step)), output)
            positions = anchors + step - 1
            keys = concat_keys(keys, attention.keys_values(inputs, positions))
            mask = torch.cat([mask, own], dim=1)
            output = self.block_output(self.block(inputs, residual, positions, keys, mask))
            yield output
