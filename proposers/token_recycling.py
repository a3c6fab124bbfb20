"""Token recycling (Luo et al., arXiv 2408.08696): drafts what the target last held likely behind each token.

Every verified row names the likeliest next tokens, and elsewhere all but one of them are thrown away. Here a table
keeps the last ones of every token, those of rejected drafts too, and a tree of what it holds behind the last token is
the next draft. So a target without a drafter, on traffic without repetitions, has drafts from its first tokens on, and
nothing is trained. Where the paper's tree has one shape, this one has the nodes whose probabilities, as they were last
seen, are highest. Candidates are not drawn, so every rule looks for the target's own token among them.
"""

from __future__ import annotations

import torch

from kernels.reference.likeliest_tree import Tree
from proposers.base import Proposer, ProposerContext, draft_tokens_from_lists
from proposers.captured.drafter import CapturedDrafter, NoDrafts
from proposers.captured.recycled import CapturedRecycling
from proposers.lookup.candidate_table import CandidateTable
from proposers.trees.draft_tree import draft_tokens_from_nodes
from runner.engine.request import DraftTokens, VerifyOutput
from runner.engine.schedule import Schedule
from runner.engine.upload import to_device


class TokenRecyclingProposer(Proposer):
    """All requests share one table, the running ones and those to come."""

    reads_logits = True

    def __init__(
        self,
        *,
        num_speculative_tokens: int,
        context: ProposerContext,
        speculative_token_tree: str | None = "dynamic",
        tree_depth: int = 6,
    ) -> None:
        super().__init__(num_speculative_tokens=num_speculative_tokens, context=context)
        self.tree_depth = tree_depth if speculative_token_tree == "dynamic" else None
        self._table = CandidateTable(vocab_size=context.vocab_size, device=context.device)

    @torch.inference_mode()
    def propose(self, schedule: Schedule) -> DraftTokens:
        device, limits = self.context.device, [item.max_draft_tokens for item in schedule.decoding]
        if not any(limits):
            return DraftTokens.empty(len(limits), device)
        token_ids, parents = torch.stack(self.nodes(schedule)).tolist()  # the step's one look at the device
        if self.tree_depth is not None:
            return draft_tokens_from_nodes(token_ids, parents, limits, device)
        chains = [[token for token in own[:limit] if token >= 0] for own, limit in zip(token_ids, limits, strict=True)]
        return draft_tokens_from_lists(chains, device)

    def nodes(self, schedule: Schedule) -> Tree:
        """Of each decoding request as many as any may draft, the likeliest first: its first n are its draft of n."""
        requests = [item.request for item in schedule.decoding]
        num_nodes = max(item.max_draft_tokens for item in schedule.decoding)
        last = [request.last_token_id for request in requests]
        depth, width = (num_nodes, 1) if self.tree_depth is None else (min(self.tree_depth, num_nodes), None)
        last_token_ids = to_device(last, torch.int64, self.context.device)
        return self._table.trees(last_token_ids, num_nodes=num_nodes, depth=depth, width=width)

    @torch.inference_mode()
    def update(self, schedule: Schedule, output: VerifyOutput) -> None:
        if output.judged is None or self.num_speculative_tokens == 0:
            return
        token_ids, logits, of_requests = output.judged
        if not all(item.request.sampling_params.speculates for item in schedule.scheduled):
            # They leave no trace in what others are drafted, as where a step of theirs runs whole, without a drafter.
            items = [item for item in schedule.scheduled if item.yields_token]
            speculates = [items[place].request.sampling_params.speculates for place in of_requests]
            token_ids = torch.where(to_device(speculates, torch.bool, token_ids.device), token_ids, -1)
        self._table.learn(token_ids, logits)

    def captured_drafter(self, num_tokens: int) -> CapturedDrafter:
        if self.num_speculative_tokens == 0:
            return NoDrafts()
        # Where the load allows no drafts, it goes on learning.
        depth = None if self.tree_depth is None or num_tokens == 0 else min(self.tree_depth, num_tokens)
        return CapturedRecycling(num_tokens, table=self._table, tree_depth=depth, capacity=self.context.max_num_seqs)

    @torch.inference_mode()
    def restart(self) -> None:
        self._table.clear()
