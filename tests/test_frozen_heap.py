"""A full collection of garbage took a quarter of a second in the middle of a pass, a fifth of its time."""

from __future__ import annotations

import gc
import weakref

import pytest

import runner.frozen_heap as frozen_heap_module
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


class Cycle:
    def __init__(self) -> None:
        self.me = self


def test_a_program_of_many_short_blocks_is_rid_of_its_own_cycles(monkeypatch: pytest.MonkeyPatch) -> None:
    """Those made between blocks at once, those that were there in one once enough has come."""
    monkeypatch.setattr(gc, "isenabled", lambda: True)  # tests run without
    with frozen_heap():
        pass
    young = weakref.ref(Cycle())
    with frozen_heap():
        assert young() is None
    cycle = Cycle()
    old = weakref.ref(cycle)
    with frozen_heap():
        pass
    del cycle
    with frozen_heap():
        assert old() is not None
    monkeypatch.setattr(frozen_heap_module, "MOST_GROWTH", 0)
    monkeypatch.setattr(frozen_heap_module, "_heap", 0)
    monkeypatch.setattr(frozen_heap_module, "_growth", 1)
    with frozen_heap():
        assert old() is None


def test_who_switched_collection_off_has_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gc, "isenabled", lambda: False)
    cycle = weakref.ref(Cycle())
    with frozen_heap():
        assert cycle() is not None
