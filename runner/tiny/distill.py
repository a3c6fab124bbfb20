"""How the draft learns to guess the target: the target's own text, and the target's probabilities as labels.

`generate_text` continues pieces of the training text with the target, half greedily and half at temperature 1,
because a draft is asked to guess what the target writes, not what people wrote. `distillation_loss` is the forward
Kullback-Leibler divergence to the target's distribution (Hinton et al. 2015; on the target's text: DistillSpec,
arXiv 2310.08461), up to the constant entropy of the target.
"""

from __future__ import annotations

import copy
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import DynamicCache, LlamaForCausalLM

MIN_PROMPT_TOKENS = 32
WINDOWS_AT_ONCE = 8  # of held-out text


@torch.inference_mode()
def generate_text(
    target: LlamaForCausalLM,
    prompts: Tensor,  # [num_sequences, prompt_len] int64
    *,
    length: int,
    batch_size: int,
    generator: torch.Generator,  # on the CPU: one stream of noise whatever the device
    on_tokens: Callable[[int], None],
    dtype: torch.dtype = torch.bfloat16,  # half the cache to read; the labels still come from `target`
) -> Tensor:
    """[num_sequences, length] int64 on the CPU: prompts and the target's continuations.

    Every batch cuts its prompts to a length of its own, so that continuations start at many positions. Even rows are
    greedy, odd rows are drawn at temperature 1. The separator ends nothing: the text runs on into a new document.
    """
    device = target.device
    writer = copy.deepcopy(target)
    nn.Module.to(writer, dtype)
    finished = []
    for prompt_batch in torch.split(prompts, batch_size):
        max_prompt = min(prompts.shape[1], length // 2)
        prompt_len = int(torch.randint(MIN_PROMPT_TOKENS, max_prompt + 1, (1,), generator=generator))
        tokens = prompt_batch[:, :prompt_len].to(device)
        num_rows = len(tokens)
        greedy = (torch.arange(num_rows, device=device) % 2 == 0).unsqueeze(1)
        cache = DynamicCache(config=target.config)
        fed = tokens
        for _ in range(prompt_len, length):
            logits = writer(input_ids=fed, past_key_values=cache, logits_to_keep=1).logits[:, -1].float()
            uniform = torch.rand(logits.shape, generator=generator).clamp_(1e-7, 1 - 1e-7).to(device)
            drawn = (logits - torch.log(-torch.log(uniform))).argmax(dim=-1, keepdim=True)
            fed = torch.where(greedy, logits.argmax(dim=-1, keepdim=True), drawn)
            tokens = torch.cat([tokens, fed], dim=1)
            on_tokens(num_rows)
        finished.append(tokens.cpu())
    return torch.cat(finished)


def distillation_loss(draft: LlamaForCausalLM, target: LlamaForCausalLM, tokens: Tensor) -> Tensor:
    """Mean cross-entropy of the draft against the target's distribution over all of `tokens` [rows, length]."""
    with torch.autocast(tokens.device.type, torch.bfloat16):
        with torch.no_grad():
            target_logits = target(input_ids=tokens, use_cache=False).logits
        draft_logits = draft(input_ids=tokens, use_cache=False).logits
    probs = target_logits.float().flatten(0, 1).softmax(dim=-1)
    return F.cross_entropy(draft_logits.float().flatten(0, 1), probs)


def next_token_loss(model: LlamaForCausalLM, tokens: Tensor) -> Tensor:
    """Mean cross-entropy of each of `tokens` [rows, length] given those before it."""
    with torch.autocast(tokens.device.type, torch.bfloat16):
        logits = model(input_ids=tokens[:, :-1], use_cache=False).logits
    return F.cross_entropy(logits.float().flatten(0, 1), tokens[:, 1:].flatten())


@torch.no_grad()
def held_out_loss(model: LlamaForCausalLM, windows: Tensor) -> float:
    """Nats per token in float32 over `windows` [num_windows, length], each predicted from its own beginning."""
    total = 0.0
    for tokens in torch.split(windows, WINDOWS_AT_ONCE):
        batch = tokens.to(model.device)
        logits = model(input_ids=batch[:, :-1], use_cache=False).logits
        total += F.cross_entropy(logits.flatten(0, 1), batch[:, 1:].flatten(), reduction="sum").item()
    return total / windows[:, 1:].numel()
