"""How many KV blocks a run gets: what is left of the memory when the largest steps have what they need.

On a GPU the target's run once, over a cache of one block, and their peak memory is measured, after their kernels have
been compiled. By then the weights are loaded, the proposer's too; its passes come before and behind the target's, and
are taken to need no more than these.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from proposers.base import Proposer
from runner.config import HardwareConfig
from runner.engine.decoder import Decoder
from runner.engine.errors import UserError
from runner.engine.graphs import MAX_OUTPUT_BYTES
from runner.engine.launch import Part
from runner.engine.memory import GIB, as_size, available_memory, peak_bytes, release_unused, require_memory
from runner.engine.model_runner import ModelRunner
from runner.engine.request import DraftTokens, Request
from runner.engine.sampling import SamplingRows
from runner.engine.sampling_params import SamplingParams
from runner.engine.shard import Shard
from verifier.rejection_sampler import RejectionSampler

CPU_CACHE_BYTES = 4 * GIB  # as vLLM's default on the CPU
# Share of a GPU's memory kept free beyond what the profile measures, for the graphs themselves and fragmentation.
SPARE_SHARE = 0.02
REMEDY = "lower model.max_model_len, raise hardware.gpu_memory_utilization, or choose a smaller model"


def num_cache_blocks(
    hardware: HardwareConfig,
    *,
    target: ModelRunner,
    proposer: Proposer,
    rejection_sampler: RejectionSampler,
    max_model_len: int,
    shard: Shard,
) -> int:
    """KV blocks for the target and the proposer, the null block included; as many in every rank.

    Raises:
        UserError: one request of max_model_len does not fit, or the blocks that were asked for do not.
    """
    device = target.device
    per_block = target.cache_bytes_per_block + proposer.cache_bytes_per_block
    state_bytes = target.num_state_bytes(hardware.max_num_seqs, proposer.num_speculative_tokens) + proposer.state_bytes
    if hardware.num_gpu_blocks_override is not None:
        blocks = hardware.num_gpu_blocks_override + 1
        what = f"a KV cache of hardware.num_gpu_blocks_override={hardware.num_gpu_blocks_override} blocks"
        needed = shard.num_beside(device) * (blocks * per_block + state_bytes)
        require_memory(needed, device, what, "lower it, or leave it out to have as many as fit")
        return blocks
    per_request = -(-max_model_len // hardware.block_size)
    wanted = hardware.max_num_seqs * per_request + 1
    if device.type == "cuda":
        budget = _gpu_budget(hardware, target, proposer, rejection_sampler, max_model_len)
    else:
        budget = int(available_memory(device) * hardware.gpu_memory_utilization) // shard.num_beside(device)
        budget = min(budget, max(CPU_CACHE_BYTES, (per_request + 1) * per_block) + state_bytes)
    budget -= state_bytes
    blocks = shard.least(min(wanted, max(0, budget) // per_block))
    if blocks < per_request + 1:
        beside = fewer = ""
        if state_bytes:
            what = f"{as_size(state_bytes)} of states and trees"
            beside = f" beside {what} for hardware.max_num_seqs={hardware.max_num_seqs}"
            fewer = ", or lower hardware.max_num_seqs"
        raise UserError(
            f"the KV cache of one request of max_model_len={max_model_len} needs "
            f"{as_size((per_request + 1) * per_block)} on {device}, available are {as_size(max(0, budget))}{beside}; "
            f"{REMEDY}{fewer}"
        )
    return blocks


@dataclass(frozen=True, kw_only=True)
class LargestSteps:
    """Runs a step of prompts alone, and one in which all requests verify all their drafts; the tokens mean nothing."""

    target: ModelRunner
    rejection_sampler: RejectionSampler
    max_num_seqs: int
    max_num_batched_tokens: int
    max_model_len: int
    num_speculative_tokens: int
    tap_layers: tuple[int, ...]

    def compute_prompts(self) -> None:
        prompts = list[Request]()
        left = self.max_num_batched_tokens
        while left > 0 and len(prompts) < self.max_num_seqs:
            prompts.append(self._request(len(prompts), [0] * min(left, self.max_model_len)))
            left -= prompts[-1].num_prompt_tokens
        # Scored: then no layer is left out for any row.
        parts = [Part(request=own, start=0, end=own.num_tokens, num_logits=1, scored_from=0) for own in prompts]
        self._over_one_block(lambda: self.target.forward(parts, None, lambda logits: None, self.tap_layers))

    def verify_drafts(self) -> None:
        """At the longest context: attention keeps partial results of every split of it, for all rows alike."""
        device = self.target.device
        num_drafts = min(self.num_speculative_tokens, self.max_model_len - 2)
        count = max(1, min(self.max_num_seqs, self.max_num_batched_tokens // (num_drafts + 1)))
        prompt = [0] * (self.max_model_len - num_drafts - 1)  # shared by all requests, so that it takes memory once
        end = len(prompt) + 1
        requests = [self._request(index, prompt, num_drafts + 1) for index in range(count)]
        for request in requests:
            request.output_token_ids.append(0)
        token_ids = torch.zeros(count * num_drafts, dtype=torch.int64, device=device)
        vocab_size = self.target.model.vocab_size
        parts = [
            Part(request=own, start=end - 1, end=end, num_draft_tokens=num_drafts, num_logits=num_drafts + 1)
            for own in requests
        ]

        def verify() -> None:
            probs = None
            if self.rejection_sampler.rule.reads_draft_probs:  # as large as the logits, while these are there
                probs = torch.full((len(token_ids), vocab_size), 1 / vocab_size, device=device)
            drafts = DraftTokens(
                token_ids=token_ids, cu_num_draft_tokens=[num_drafts * index for index in range(count + 1)], probs=probs
            )
            logits = self.target.forward(parts, drafts.token_ids, tap_layers=self.tap_layers).logits
            rows = SamplingRows.build(
                requests,
                [index for index in range(count) for _ in range(num_drafts + 1)],
                [place for _ in range(count) for place in range(num_drafts + 1)],
                drafts.token_ids.view(count, num_drafts) if num_drafts else None,
                vocab_size=vocab_size,
                eos_token_ids=(),
                device=device,
            )
            self.rejection_sampler(logits, drafts, rows)

        self._over_one_block(verify)

    def _over_one_block(self, work: Callable[[], object]) -> None:
        self.target.allocate_cache(2, num_uncertain=self.num_speculative_tokens)
        try:
            work()
        finally:
            self.target.release_cache()

    def _request(self, index: int, prompt_token_ids: list[int], num_more: int = 0) -> Request:
        """A request whose every block is the one block there is."""
        num_tokens = len(prompt_token_ids) + num_more
        return Request(
            request_id=f"profile-{index}",
            prompt_token_ids=prompt_token_ids,
            sampling_params=SamplingParams(temperature=0.7, top_p=0.9, top_k=50),
            seed=index,
            block_table=[1] * -(-num_tokens // self.target.block_size),
        )


def _gpu_budget(
    hardware: HardwareConfig,
    target: ModelRunner,
    proposer: Proposer,
    rejection_sampler: RejectionSampler,
    max_model_len: int,
) -> int:
    steps = LargestSteps(
        target=target,
        rejection_sampler=rejection_sampler,
        max_num_seqs=hardware.max_num_seqs,
        max_num_batched_tokens=hardware.max_num_batched_tokens,
        max_model_len=max_model_len,
        num_speculative_tokens=proposer.num_speculative_tokens,
        tap_layers=proposer.tap_layers,
    )
    try:
        prompts = _peak_bytes(target, steps.compute_prompts)
        verified = _peak_bytes(target, steps.verify_drafts)
    except torch.OutOfMemoryError as error:
        raise UserError(
            f"a step of hardware.max_num_batched_tokens={hardware.max_num_batched_tokens} tokens does not fit "
            f"{target.device} beside the weights; lower it or hardware.max_num_seqs, or choose a smaller model"
        ) from error
    release_unused()
    free, total = torch.cuda.mem_get_info(target.device)
    reserved = max(prompts, verified)
    if target.graphs is not None:  # what is captured, short prompts too, has memory of its own
        num_stores = 1 + proposer.has_passes  # of the target's passes, and a drafter's own
        most_rows = hardware.max_num_batched_tokens
        short_prompts = prompts * min(target.most_captured_prompt_rows, most_rows) // most_rows
        reserved += max(short_prompts, verified) + num_stores * MAX_OUTPUT_BYTES
    return int(total * (hardware.gpu_memory_utilization - SPARE_SHARE)) - (total - free) - reserved


def _peak_bytes(target: ModelRunner, step: Callable[[], None]) -> int:
    """As peak_bytes; with kernels compiled before, where no code but ours sees what they have not computed."""
    if isinstance(target.model, Decoder):
        from kernels.kernel import compile_ahead  # Triton, which a CPU's engine can do without

        compile_ahead(step)
        release_unused()  # programs take memory beside torch's
    return peak_bytes(target.device, step)
