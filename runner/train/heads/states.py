"""What a head learns from: the target's tokens and hidden states over some texts, computed once for all heads.

Positions: `normed[:, p]` is what the target's head turns into the distribution of the token at position p + 1. `taps`
holds residual streams, numbered as Hugging Face numbers `hidden_states`: i = after i layers.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel


@dataclass(frozen=True, kw_only=True)
class TargetStates:
    """The target's view of some texts; stored in bfloat16, which the heads see at serving time too."""

    token_ids: Tensor  # [num_texts, length] int64
    taps: Tensor  # [num_texts, length, num_taps * hidden]
    normed: Tensor  # [num_texts, length, hidden], after the final norm

    def rows(self, rows: Tensor) -> TargetStates:
        """These texts [num_rows] alone, in float32."""
        return TargetStates(
            token_ids=self.token_ids[rows], taps=self.taps[rows].float(), normed=self.normed[rows].float()
        )

    @property
    def length(self) -> int:
        return self.token_ids.shape[1]


@torch.no_grad()
def target_states(
    target: PreTrainedModel,
    token_ids: Tensor,  # [num_texts, length] int64
    *,
    tap_layers: tuple[int, ...],  # each < num_layers: Hugging Face's last hidden state is already normed
    batch_size: int,
) -> TargetStates:
    taps, normed = [], []
    for tokens in torch.split(token_ids, batch_size):
        states = target.base_model(
            input_ids=tokens.to(target.device), output_hidden_states=True, use_cache=False
        ).hidden_states
        taps.append(torch.cat([states[layer] for layer in tap_layers], dim=-1).bfloat16())
        normed.append(states[-1].bfloat16())
    return TargetStates(token_ids=token_ids.to(target.device), taps=torch.cat(taps), normed=torch.cat(normed))


class FrozenTarget:
    """The two ends of the target that heads share, its embeddings and its head, in float32."""

    def __init__(self, model: PreTrainedModel) -> None:
        self.model = model
        self.config = model.config.get_text_config()
        self.embedding: Tensor = _weight(model.get_input_embeddings())  # [vocab, hidden]
        self.lm_head: Tensor = _weight(model.get_output_embeddings())  # type: ignore[no-untyped-call]  # [vocab, hidden]

    @property
    def last_layer(self) -> nn.Module:
        """Where a head's block may start from, as far as names and shapes agree."""
        return next(module for module in self.model.modules() if isinstance(module, nn.ModuleList))[-1]

    def embed(self, token_ids: Tensor) -> Tensor:
        return nn.functional.embedding(token_ids, self.embedding)

    def logits(self, normed: Tensor) -> Tensor:
        return nn.functional.linear(normed, self.lm_head)

    @torch.no_grad()
    def probs(self, normed: Tensor, token_ids: Tensor | None = None) -> Tensor:
        """The target's distribution [..., vocab] at these states, over `token_ids` alone where they are given."""
        lm_head = self.lm_head if token_ids is None else self.lm_head[token_ids]
        return nn.functional.linear(normed, lm_head).softmax(dim=-1)


def _weight(module: nn.Module | None) -> Tensor:
    assert module is not None
    weight = module.weight
    assert isinstance(weight, Tensor)
    return weight.detach().float()
