"""Logits with each token's noise on top: by their order come candidates that are drawn without replacement.

A token's noise is the very number that kernels/sampling.py draws with. Follows kernels/reference/perturb.py.
"""

# mypy: disable-error-code="no-untyped-def, untyped-decorator"

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.kernel import Kernel
from kernels.philox import gumbel_block
from kernels.scores import check_rows, load_logits
from kernels.sizes import cdiv

BLOCK = 1024  # tokens of a program


@Kernel
@triton.jit(do_not_specialize_on_alignment=["positions_ptr"])
def perturb_kernel(
    perturbed_ptr,  # [num_rows, vocab_size] float32
    logits_ptr,  # [num_rows, vocab_size], rows row_stride apart
    seeds_ptr,  # [num_rows] int64
    positions_ptr,  # [num_rows] int64
    draft_steps_ptr,  # [num_rows] int64
    row_stride,
    vocab_size,
    stream,
    BLOCK: tl.constexpr,
):
    row, split = tl.program_id(0).to(tl.int64), tl.program_id(1)
    tokens = split * BLOCK + tl.arange(0, BLOCK)
    logits = load_logits(logits_ptr + row * row_stride, tokens, vocab_size)
    seed, position, draft_step = tl.load(seeds_ptr + row), tl.load(positions_ptr + row), tl.load(draft_steps_ptr + row)
    noise = gumbel_block(seed, position, stream, draft_step, split * BLOCK, BLOCK)
    tl.store(perturbed_ptr + row * vocab_size + tokens, logits + noise, mask=tokens < vocab_size)


def perturb(
    logits: Tensor,  # [num_rows, vocab] float32, rows any distance apart
    seeds: Tensor,  # [num_rows] int64
    positions: Tensor,  # [num_rows] int64
    draft_steps: Tensor,  # [num_rows] int64
    *,
    stream: int,
) -> Tensor:
    """logits + gumbel(seed, position, stream, draft step) of each token, [num_rows, vocab] float32."""
    check_rows(logits, seeds, positions, draft_steps)
    num_rows, vocab_size = logits.shape
    perturbed = torch.empty(num_rows, vocab_size, device=logits.device)
    if num_rows:
        perturb_kernel[(num_rows, cdiv(vocab_size, BLOCK))](
            perturbed,
            logits,
            seeds,
            positions,
            draft_steps,
            logits.stride(0),
            vocab_size,
            int(stream),
            BLOCK=BLOCK,
            num_warps=4,
            enable_fp_fusion=False,
        )
    return perturbed
