"""A full collection of garbage took a quarter of a second in the middle of a pass, a fifth of its time."""

from __future__ import annotations

import gc

import pytest

from runner.engine.sampling_params import SamplingParams
from runner.frozen_heap import frozen_heap
from tests.conftest import Engines


def test_while_requests_run_what_was_there_before_is_not_looked_at(engines: Engines) -> None:
    llm, frozen = engines(), list[int]()
    params = SamplingParams(max_tokens=3, ignore_eos=True)
    assert gc.get_freeze_count() == 0
    llm.generate([{"prompt_token_ids": [5, 6]}], params, observer=lambda _: frozen.append(gc.get_freeze_count()))
    assert min(frozen) > 100_000 and gc.get_freeze_count() == 0


def test_it_thaws_also_behind_an_error_and_never_what_others_froze() -> None:
    with pytest.raises(KeyboardInterrupt), frozen_heap():
        raise KeyboardInterrupt
    assert gc.get_freeze_count() == 0
    gc.freeze()
    with frozen_heap():
        pass
    assert gc.get_freeze_count() > 0
    gc.unfreeze()
