"""kernels/reference/mask_and_penalise.py in one launch, which reads each logit once."""

# mypy: disable-error-code="no-untyped-def, untyped-decorator"

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.kernel import Kernel
from kernels.reference.mask_and_penalise import PROMPT as PROMPT_IN_TORCH
from kernels.scores import check_rows, load_logits
from kernels.sizes import cdiv

BLOCK = 1024  # tokens of a program
PROMPT: tl.constexpr = tl.constexpr(PROMPT_IN_TORCH)


@Kernel
@triton.jit(do_not_specialize=["rows_per_request", "num_forbidden", "num_words", "depth"])
def mask_and_penalise_kernel(
    changed_ptr,  # [num_rows, vocab_size] float32
    logits_ptr,  # [num_rows, vocab_size], rows row_stride apart
    bias_ptr,  # [num_requests, vocab_size] float32, or None
    forbidden_ptr,  # [num_rows, num_forbidden] int64, or None
    bitmask_ptr,  # [num_rows, num_words] int32, or None
    said_ptr,  # [num_requests, vocab_size] int32, or None
    penalties_ptr,  # [num_requests, 3] float32; read with said_ptr
    ancestors_ptr,  # [num_rows, depth] int64, or None
    row_stride,
    vocab_size,
    rows_per_request,
    num_forbidden,
    num_words,
    depth,
    BLOCK: tl.constexpr,
):
    row, tokens = tl.program_id(0).to(tl.int64), tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    request, is_token = row // rows_per_request, tokens < vocab_size
    logits = load_logits(logits_ptr + row * row_stride, tokens, vocab_size)
    if bias_ptr is not None:
        logits += tl.load(bias_ptr + request * vocab_size + tokens, mask=is_token, other=0.0)
    if forbidden_ptr is not None:
        for place in range(num_forbidden):
            token_id = tl.load(forbidden_ptr + row * num_forbidden + place)
            logits = tl.where(tokens == token_id, float("-inf"), logits)
    if bitmask_ptr is not None:
        words = tl.load(bitmask_ptr + row * num_words + tokens // 32, mask=is_token, other=0)
        logits = tl.where(((words >> (tokens % 32)) & 1) != 0, logits, float("-inf"))
    if said_ptr is not None:
        said = tl.load(said_ptr + request * vocab_size + tokens, mask=is_token, other=0)
        if ancestors_ptr is not None:
            for place in range(depth):
                said += (tokens == tl.load(ancestors_ptr + row * depth + place)).to(tl.int32)
        own_ptr = penalties_ptr + request * 3
        repetition, frequency, presence = tl.load(own_ptr), tl.load(own_ptr + 1), tl.load(own_ptr + 2)
        count = (said & (PROMPT - 1)).to(tl.float32)
        repeated = tl.where(logits > 0, tl.div_rn(logits, repetition), logits * repetition)
        logits = tl.where(said > 0, repeated, logits) - frequency * count
        logits -= presence * (count > 0).to(tl.float32)
    tl.store(changed_ptr + row * vocab_size + tokens, logits, mask=is_token)


def mask_and_penalise(
    logits: Tensor,  # [num_requests * n, vocab] float32, rows any distance apart
    *,
    bias: Tensor | None = None,  # [num_requests, vocab] float32
    forbidden: Tensor | None = None,  # [num_requests * n, most] int64
    bitmask: Tensor | None = None,  # [num_requests * n, ceil(vocab / 32)] int32
    said: Tensor | None = None,  # [num_requests, vocab] int32
    penalties: Tensor | None = None,  # [num_requests, 3] float32
    ancestors: Tensor | None = None,  # [num_requests * n, depth] int64
) -> Tensor:
    """What kernels.reference.mask_and_penalise.mask_and_penalise says, bit for bit."""
    check_rows(logits, bias, forbidden, bitmask, said, penalties, ancestors)
    num_rows, vocab_size = logits.shape
    changed = torch.empty(num_rows, vocab_size, device=logits.device)
    tables = next((table for table in (bias, said) if table is not None), logits)
    if num_rows:
        mask_and_penalise_kernel[(num_rows, cdiv(vocab_size, BLOCK))](
            changed,
            logits,
            bias,
            forbidden,
            bitmask,
            said,
            penalties,
            ancestors,
            logits.stride(0),
            vocab_size,
            num_rows // len(tables),
            0 if forbidden is None else forbidden.shape[1],
            0 if bitmask is None else bitmask.shape[1],
            0 if ancestors is None else ancestors.shape[1],
            BLOCK=BLOCK,
            num_warps=4,
            enable_fp_fusion=False,
        )
    return changed
