"""Prompts that begin alike are computed once: later ones start behind the blocks that are there (vLLM, SGLang).

Only blocks of prompts are shared. A token that was generated went through the kernels for generated tokens, and the
same token in a later prompt goes through those for prompts, whose bits may differ.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Sequence
from hashlib import blake2b

from runner.engine.block_manager import BlockManager
from runner.engine.request import Request

KEY_BYTES = 32  # equal keys of unequal texts would break the promise: there are none


class PrefixCache:
    """Which blocks a request may begin with, and which of its own others may."""

    def __init__(self, blocks: BlockManager, fills_blocks: Callable[[Request], bool] | None) -> None:
        """fills_blocks: the proposer's; None: nothing is shared."""
        self.blocks, self._fills_blocks = blocks, fills_blocks
        self._announced = set[bytes]()  # by keys_to_come, and not there yet
        # Announced by requests that ended before their drafter had followed, as with a first token that is eos. Where
        # one does, the next may too: if all the others waited for it, and then for the next, none would share a step.
        self._in_vain = set[bytes]()
        self._last_prompt, self._last_keys = list[int](), list[bytes]()  # of the request that was opened last

    def open(self, request: Request) -> None:
        """Comes before everything else."""
        if self._fills_blocks is None:
            return
        if request.prompt_token_ids is not self._last_prompt:  # siblings come one behind another, with one list
            self._last_prompt = request.prompt_token_ids
            self._last_keys = prefix_keys(request.prompt_token_ids, self.blocks.block_size)
        request.prefix_keys = self._last_keys

    def find(self, request: Request) -> list[int]:
        """Blocks that hold the beginning of its prompt already."""
        return self.blocks.find(request.prefix_keys) if request.reads_prefix else []

    def share(self, request: Request, found: Sequence[int]) -> None:
        """Begin its block table with these, which `find` found just now."""
        self.blocks.share(found, request.block_table)
        request.num_known_blocks = len(found)
        if self._fills_blocks is not None and request.reads_prefix and request.num_preemptions == 0:
            request.num_cached_tokens = len(found) * self.blocks.block_size

    def keys_to_come(self, request: Request) -> Sequence[bytes]:
        """Of blocks that others will find once this request has computed them."""
        if request.num_known_blocks == len(request.prefix_keys) or not self._is_filled(request):
            return ()
        keys = [key for key in request.prefix_keys[request.num_known_blocks :] if key not in self._in_vain]
        self._announced.update(keys)
        return keys

    def make_known(self, request: Request) -> None:
        """Let others find what is complete of its prompt; comes when the drafter has followed, or never will."""
        known = request.num_known_blocks
        complete = min(len(request.prefix_keys), (request.num_computed_tokens - 1) // self.blocks.block_size)
        if known >= complete:
            return
        keys = request.prefix_keys[known:complete]
        if self._is_filled(request):
            self.blocks.keep(keys, request.block_table[known:complete])
            request.num_known_blocks = complete
            self._announced.difference_update(keys)
            self._in_vain.difference_update(keys)
        elif request.is_finished:
            self._in_vain.update(self._announced.intersection(keys))

    def _is_filled(self, request: Request) -> bool:
        return self._fills_blocks is not None and self._fills_blocks(request)


def prefix_keys(prompt_token_ids: Sequence[int], block_size: int) -> list[bytes]:
    """Keys of the blocks that hold prompt tokens alone and have another one behind them.

    So at least one token of the prompt is behind the last of them, for the target has to predict what follows. A key is
    a digest of the block's tokens, of the key before it, and of the token behind it: a drafter's head keeps at place p
    its row of the token at p + 1 (proposers/drafting/from_hidden_states.py). So a block that is found can be used as it
    is, whatever the method (vLLM's lookahead block hashes).
    """
    keys, before = list[bytes](), b""
    for end in range(block_size, len(prompt_token_ids), block_size):
        tokens = array("q", prompt_token_ids[end - block_size : end + 1])
        before = blake2b(before + tokens.tobytes(), digest_size=KEY_BYTES).digest()
        keys.append(before)
    return keys
