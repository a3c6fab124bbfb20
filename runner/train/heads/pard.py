"""PARD (arXiv 2504.18583): an ordinary small language model that guesses K tokens in one pass behind mask tokens.

The pending token is followed by K - 1 mask tokens; the row of the i-th mask guesses the token i + 1 places behind the
pending one. Training lays such groups of masks behind a random choice of places in a text; a mask sees the text up to
its place and the masks of its own group. The head starts from the family's draft model.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from transformers import LlamaForCausalLM

from runner.train.heads.head import ANCHORS_AT_ONCE, Head, soft_label_loss
from runner.train.heads.states import FrozenTarget, TargetStates


class PardHead(Head):
    def __init__(
        self,
        target: FrozenTarget,
        *,
        draft_model: LlamaForCausalLM,
        mask_token_id: int,
        num_tokens: int,  # K of training
        num_anchors: int,
        place_decay: float,
    ) -> None:
        super().__init__(target)
        self.lm = draft_model
        self.mask_token_id = mask_token_id
        self.num_tokens, self.num_anchors, self.place_decay = num_tokens, num_anchors, place_decay

    def loss(self, states: TargetStates, generator: torch.Generator) -> Tensor:
        usable = states.length - self.num_tokens + 1
        anchors = torch.randperm(usable, generator=generator)[: self.num_anchors].sort().values
        anchors = anchors.to(states.token_ids.device)
        text, masks = self.logits(states, anchors, self.num_tokens)
        probs = self.target.probs(states.normed)
        total = soft_label_loss(text, probs)
        for place in range(1, self.num_tokens):
            labels = probs[:, anchors + place]
            total = total + self.place_decay**place * soft_label_loss(masks[:, :, place - 1], labels)
        return total

    def logits(self, states: TargetStates, anchors: Tensor, num_tokens: int) -> tuple[Tensor, Tensor]:
        """Of the text [num_texts, length, vocab] and of the masks [num_texts, num_anchors, num_tokens - 1, vocab]."""
        num_texts, length = states.token_ids.shape
        text = torch.arange(length, device=anchors.device)
        places = torch.arange(1, num_tokens, device=anchors.device)
        groups = torch.arange(len(anchors), device=anchors.device).repeat_interleave(len(places))
        place = places.repeat(len(anchors))
        masks = states.token_ids.new_full((num_texts, len(place)), self.mask_token_id)
        sees_text = text <= anchors[groups].unsqueeze(1)
        sees_masks = (groups == groups.unsqueeze(1)) & (place <= place.unsqueeze(1))
        text_rows = torch.cat([text <= text.unsqueeze(1), sees_text.new_zeros(length, len(place))], dim=1)
        mask = torch.cat([text_rows, torch.cat([sees_text, sees_masks], dim=1)])
        logits = self.lm(
            input_ids=torch.cat([states.token_ids, masks], dim=1),
            position_ids=torch.cat([text, anchors[groups] + place]).unsqueeze(0),
            attention_mask=mask.expand(num_texts, 1, -1, -1),
            use_cache=False,
        ).logits
        return logits[:, :length], logits[:, length:].unflatten(1, (len(anchors), -1))

    @torch.no_grad()
    def draft(self, states: TargetStates, num_speculative_tokens: int) -> Tensor:
        num_texts, length = states.token_ids.shape
        drafts = states.token_ids.new_zeros(num_texts, length, num_speculative_tokens)
        for anchors in torch.split(torch.arange(length, device=states.token_ids.device), ANCHORS_AT_ONCE):
            text, masks = self.logits(states, anchors, num_speculative_tokens)
            drafts[:, anchors, 0] = text[:, anchors].argmax(dim=-1)
            drafts[:, anchors, 1:] = masks.argmax(dim=-1)
        return drafts

    def published_config(self) -> dict[str, Any]:
        return {
            **self.lm.config.to_diff_dict(),
            "pard_token": self.mask_token_id,
            "spd_type": "pard",
            "dtype": "bfloat16",
        }

    def published_tensors(self) -> dict[str, Tensor]:
        return {name.removeprefix("lm."): tensor for name, tensor in super().published_tensors().items()}
