"""A small model that was trained to draft in one pass, over mask tokens (PARD, An et al., arXiv 2504.18583).

Behind the committed text stand K - 1 mask tokens; the last row of the text and the rows of the masks yield K
distributions. KV of mask rows is scratch: what is committed there is computed again in the next pass. A PARD-2 draft
adds projections of the target's hidden states to its embeddings (proposers/heads/target_features.py).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from proposers.base import ProposerContext
from proposers.captured.drafter import CapturedDrafter
from proposers.captured.pard import CapturedPard
from proposers.captured.pard2 import CapturedPard2, CapturedStates
from proposers.contexts.feature_runner import FeatureRunner
from proposers.draft_model import DraftModelProposer
from proposers.drafting.cached_rows import cached_rows
from proposers.drafting.in_one_pass import OnePassProposer
from proposers.heads.mask_token import mask_token_id
from proposers.heads.target_features import (
    FeatureConfig,
    is_pard2,
    load_target_features,
    read_feature_config,
    require_plain_embeddings,
)
from runner.engine.checkpoint import ModelSource
from runner.engine.head_checkpoint import read_head_config
from runner.engine.loader import LoadedModel
from runner.engine.model_runner import ModelRunner
from runner.engine.request import Request, VerifyOutput
from runner.engine.schedule import Schedule


class PardProposer(OnePassProposer, DraftModelProposer):
    def __init__(
        self,
        *,
        num_speculative_tokens: int,
        context: ProposerContext,
        source: ModelSource,
        draft_sample_method: str,
        max_model_len: int | None = None,
    ) -> None:
        config = read_head_config(source)
        self._feature_config: FeatureConfig | None = None
        if is_pard2(config):  # asked before the draft is loaded, which takes long
            assert context.target is not None, "its states are read"
            self._feature_config = read_feature_config(config, source, context.target)
        super().__init__(
            num_speculative_tokens=num_speculative_tokens,
            context=context,
            source=source,
            draft_sample_method=draft_sample_method,
            max_model_len=max_model_len,
        )
        self.mask_token_id = mask_token_id(config, source, self.runner.model.vocab_size)

    def make_runner(self, loaded: LoadedModel, **options: Any) -> ModelRunner:
        if self._feature_config is None:
            return super().make_runner(loaded, **options)
        model = require_plain_embeddings(loaded)
        features = load_target_features(
            self._feature_config,
            loaded.source,
            hidden_size=model.hidden_size,
            dtype=self.context.dtype,
            device=self.context.device,
        )
        return FeatureRunner(model, features, **options)

    @property
    def max_uncertain(self) -> int:
        return super().max_uncertain + max(0, self.num_speculative_tokens - 1)  # masks

    @property
    def feature_runner(self) -> FeatureRunner | None:
        """The runner, where the draft reads the target's hidden states."""
        if isinstance(self.runner, FeatureRunner) and self.num_speculative_tokens > 0:
            return self.runner
        return None

    @property
    def tap_layers(self) -> tuple[int, ...]:
        return () if self.feature_runner is None else self.feature_runner.features.tap_layers

    @torch.inference_mode()
    def update(self, schedule: Schedule, output: VerifyOutput) -> None:
        if (runner := self.feature_runner) is not None:
            assert output.hidden_states is not None, "the verifier was asked for hidden states"
            for rows in cached_rows(schedule, output.hidden_states, self.may_draft, self.max_model_len):
                runner.store(rows.family, rows.segments, rows.states)
        super().update(schedule, output)

    def captured_drafter(self, num_tokens: int) -> CapturedDrafter | None:
        reading = self.feature_runner
        if not self.runner.is_paged:
            return super().captured_drafter(num_tokens) if reading is None else None
        if num_tokens == 0:
            return super().captured_drafter(num_tokens) if reading is None else CapturedStates(reading)
        common: dict[str, Any] = {
            "num_computed": self._num_computed,
            "mask_token_id": self.mask_token_id,
            "capacity": self.context.max_num_seqs,
            # Not num_speculative_tokens: where a step of a lighter load has left more tokens, one step in parts catches
            # up, so that the draft model need not have rows for so many in every pass.
            "max_depth": self.most_drafts(num_tokens),
            "max_model_len": self.max_model_len,
            **self.captured_arguments(num_tokens),
        }
        if reading is not None:
            return CapturedPard2(runner=reading, **common)
        return CapturedPard(runner=self.runner, **common)

    def all_logits(self, requests: Sequence[Request], counts: Sequence[int]) -> torch.Tensor:
        self._catch_up(requests)
        parts = [
            self._part(request, request.num_tokens, num_draft_tokens=count - 1, num_logits=count)
            for request, count in zip(requests, counts, strict=True)
        ]
        masks = torch.full((sum(counts) - len(counts),), self.mask_token_id, device=self.context.device)
        return self.runner.run(parts, masks)
