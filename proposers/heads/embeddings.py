"""Where a head finds its tokens' embeddings: in a table of its own, or in the target's."""

from __future__ import annotations

from torch import Tensor

from runner.engine.decoder import Decoder
from runner.engine.transformers_model import TransformersModel


def embeddings_of(
    token_ids: Tensor, own: Tensor | None, target: Decoder | TransformersModel
) -> tuple[Tensor, Tensor | None]:
    """What rms_norm_pair takes of tokens [num_rows]: a table and the ids, or their rows and None.

    own: the head's table [vocab, hidden]; None: the target's. A target that scales the rows of its table is asked for
    the rows, and so is one that transformers' code embeds for, which may do that too.
    """
    if own is not None:
        return own, token_ids
    if isinstance(target, Decoder) and target.embedding_scale is None:
        return target.embed_tokens, token_ids
    return target.embed(token_ids), None
