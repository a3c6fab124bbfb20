"""The target drafts over a part of its cache: logits against transformers' under a mask, and drafts that follow.

Where nothing is left out, drafts are the target's own tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kernels.cpu.kept_blocks import kept_blocks as kept_on_cpu
from kernels.reference.kept_blocks import kept_blocks
from proposers.contexts.kept_context import KeptContext
from proposers.sparse_kv import SparseKVProposer
from runner.config import HybridMethod, SparseKVMethod, parse_method
from runner.config.problem import ConfigError
from runner.engine.errors import UserError
from runner.engine.request import Request
from runner.engine.sampling_params import SamplingParams
from runner.engine.segment import Segment
from runner.llm import LLM
from tests.assistant_checkpoints import VOCAB_SIZE
from tests.conftest import Engines, complete
from tests.emulated_device import EmulatedDevice
from tests.other_families import FAMILIES
from tests.test_early_exit import IGNORING_ENDS, NO_ENDS, llama, record_logits
from tests.test_emulated_gpu import GPU, SMALL
from tests.test_losslessness import PROMPTS, ROOMY, answers, counts
from tests.transformers_reference import (
    KeepFloat64,
    assert_as_accurate,
    in_float64,
    random_model,
    random_sequences,
    save_tokenizer,
)

BLOCK_SIZE, WINDOW = 16, 12


def method(num_speculative_tokens: int, num_sink_tokens: int, num_recent_tokens: int, **keys: Any) -> dict[str, Any]:
    return {
        "method": "sparse_kv",
        "num_speculative_tokens": num_speculative_tokens,
        "num_sink_tokens": num_sink_tokens,
        "num_recent_tokens": num_recent_tokens,
        **keys,
    }


# --- which blocks ---------------------------------------------------------------------------------------------------


@st.composite
def requests(draw: st.DrawFn) -> tuple[torch.Tensor, torch.Tensor, dict[str, int]]:
    block_size, max_blocks = draw(st.sampled_from([4, 16])), draw(st.integers(1, 9))
    lengths = draw(st.lists(st.integers(0, max_blocks * block_size), min_size=1, max_size=4))
    tables = torch.arange(len(lengths) * max_blocks).view(len(lengths), -1) + 1
    kept = {"num_first": draw(st.integers(0, 3)), "num_recent": draw(st.integers(1, 40))}
    shape = {"num_kept": draw(st.integers(1, max_blocks)), "block_size": block_size}
    return torch.tensor(lengths), tables, {**kept, **shape}


@settings(max_examples=60)
@given(requests(), st.integers(1, 3))
def test_compiled_for_a_cpu_it_says_what_the_definition_says(
    case: tuple[torch.Tensor, torch.Tensor, dict[str, int]], table_stride: int
) -> None:
    lengths, tables, kept = case
    apart = tables.repeat(1, table_stride)[:, : tables.shape[1]]
    expected = kept_blocks(lengths, tables, **kept)
    assert all(map(torch.equal, kept_on_cpu(lengths, apart, **kept), expected))


@settings(max_examples=60)
@given(requests())
def test_the_device_leaves_out_what_the_host_does(case: tuple[torch.Tensor, torch.Tensor, dict[str, int]]) -> None:
    """First blocks and the block of the first recent token stay, and all behind it."""
    lengths, tables, kept = case
    block_size, num_first, num_recent = (kept[name] for name in ("block_size", "num_first", "num_recent"))
    context = KeptContext(num_first_blocks=num_first, num_recent_tokens=num_recent, block_size=block_size)
    found = kept_blocks(lengths, tables, **{**kept, "num_kept": tables.shape[1]})
    for length, table, seen_length, seen_table in zip(lengths.tolist(), tables.tolist(), *found, strict=True):
        unseen = context.unseen_blocks(length)
        segment = Segment(start=length, num_tokens=1, block_table=table, unseen_blocks=unseen).as_seen(block_size)
        assert segment.start == seen_length
        assert segment.block_table == seen_table[: len(segment.block_table)].tolist()
        assert all(num_first <= block < (length - num_recent) // block_size for block in unseen)
        assert len(unseen) == max(0, (length - num_recent) // block_size - num_first)


@pytest.mark.parametrize("num_drafts", [1, 2, 5, 17, 18])
@pytest.mark.parametrize("num_recent", [1, 2, 15, 16, 17, 40])
def test_a_table_holds_what_rows_come_to_and_no_more(num_recent: int, num_drafts: int) -> None:
    context = KeptContext(num_first_blocks=1, num_recent_tokens=num_recent, block_size=BLOCK_SIZE)
    last_places = [
        length - len(context.unseen_blocks(length)) * BLOCK_SIZE + num_drafts - 2 for length in range(100, 200)
    ]
    assert max(last_places) // BLOCK_SIZE + 1 == context.num_kept_blocks(num_drafts)


# --- what drafts are by ---------------------------------------------------------------------------------------------


def windowed() -> Any:
    """Of its layers the first sees a window, shorter than what drafts see at a text's end."""
    from transformers import Gemma3TextConfig

    sizes = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "head_dim": 16}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2}
    layers = {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": WINDOW}
    return random_model(
        Gemma3TextConfig(vocab_size=VOCAB_SIZE, max_position_embeddings=256, **sizes, **heads, **layers, **NO_ENDS)
    )


@torch.inference_mode()
def logits_over_kept(model: Any, text: list[int], num_committed: int, num_recent: int) -> torch.Tensor:
    """Behind a text's last token; the last committed token and drafts see the first block, and recent ones."""
    size = len(text)
    rows, keys = torch.arange(size).unsqueeze(1), torch.arange(size)
    first_recent = max(1, (num_committed - num_recent) // BLOCK_SIZE) * BLOCK_SIZE
    is_seen = (keys <= rows) & ((rows < num_committed - 1) | (keys < BLOCK_SIZE) | (keys >= first_recent))
    masks = {"full_attention": is_seen, "sliding_attention": is_seen & (rows - keys < WINDOW)}
    hidden = torch.finfo(model.dtype).min
    added = {
        name: torch.zeros(size, size, dtype=model.dtype).masked_fill(~mask, hidden)[None, None]
        for name, mask in masks.items()
    }
    mask: Any = (
        added if hasattr(model.config, "sliding_window") and model.config.sliding_window else added["full_attention"]
    )
    return model(torch.tensor([text]), attention_mask=mask, use_cache=False).logits[0, -1]


# A window that goes further back than recent tokens would see the first ones too.
@pytest.mark.parametrize(("make", "num_recent"), [(llama, 1), (llama, 20), (windowed, 20)])
def test_drafts_are_by_the_logits_over_the_first_and_the_last_blocks(
    make: Callable[[], Any], num_recent: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In ragged batches, behind texts of which nothing is left out, and most is."""
    model = make()
    model.save_pretrained(tmp_path)
    save_tokenizer(tmp_path, VOCAB_SIZE)
    options: dict[str, Any] = {"device": "cpu", "dtype": "float32", "max_num_seqs": 2, "max_num_batched_tokens": 64}
    greedy = method(3, 1, num_recent, draft_sample_method="greedy")
    llm = LLM(str(tmp_path), speculative_config=greedy, enforce_eager=True, **options)
    seen, starts = record_logits(llm, monkeypatch), set[tuple[int, ...]]()
    first_logits = llm.engine.proposer.first_logits  # type: ignore[attr-defined]

    def noting(requests: Sequence[Request]) -> torch.Tensor:
        starts.update(tuple(own.tokens_between(0, own.num_tokens)) for own in requests)
        return first_logits(requests)

    monkeypatch.setattr(llm.engine.proposer, "first_logits", noting)
    prompts = [{"prompt_token_ids": own.prompt} for own in random_sequences(VOCAB_SIZE, ((2, 0), (95, 0), (60, 0)))]
    params = SamplingParams(temperature=0.8, max_tokens=20, seed=3, ignore_eos=True)
    done, _ = complete(llm, prompts, [params] * len(prompts))
    plain, _ = complete(LLM(str(tmp_path), **options), prompts, [params] * len(prompts))
    assert answers(done) == answers(plain)

    def num_committed(text: tuple[int, ...]) -> int:
        """Of a text that ends with drafts: no other text begins with one of these, for those are the target's own."""
        return next(size for size in range(len(text), 0, -1) if text[:size] in starts)

    chosen = [text for text in seen if len(text) > 50]
    assert len(chosen) > 20 and any(text not in starts for text in chosen)
    with KeepFloat64():
        exact_model = in_float64(model)
        found = [
            (
                seen[text],
                *(logits_over_kept(own, list(text), num_committed(text), num_recent) for own in (model, exact_model)),
            )
            for text in chosen
        ]
    assert_as_accurate(*map(torch.stack, zip(*found, strict=True)))


KEPT_WHOLE: dict[str, dict[str, Any]] = {  # keys of the engine
    "whole steps": {},
    "in parts": {"enforce_eager": True},
    "layers that see keys of earlier ones": {"architecture": FAMILIES["gemma4_text"]},
    "a latent, and experts": {"architecture": FAMILIES["deepseek_v3"]},
    "attention in chunks": {"architecture": FAMILIES["llama4_text"]},
    "bfloat16": {"dtype": "bfloat16"},
}


@pytest.mark.parametrize("case", KEPT_WHOLE)
def test_where_nothing_is_left_out_all_drafts_are_accepted(engines: Engines, case: str) -> None:
    llm = engines(method(4, 0, 200), **KEPT_WHOLE[case], **ROOMY)
    done, metrics = complete(llm, PROMPTS[: len(IGNORING_ENDS)], IGNORING_ENDS)
    drafted, accepted = counts(metrics)
    assert drafted == accepted > 50
    plain, _ = complete(engines(**KEPT_WHOLE[case], **ROOMY), PROMPTS[: len(IGNORING_ENDS)], IGNORING_ENDS)
    assert answers(done) == answers(plain)


@pytest.mark.parametrize(
    "architecture", [{}, FAMILIES["deepseek_v3"], FAMILIES["gpt_oss"]], ids=["llama", "latent", "windows"]
)
def test_whole_steps_draft_what_steps_in_parts_do(engines: Engines, architecture: dict[str, Any]) -> None:
    drafts = []
    for enforce_eager in (False, True):
        llm = engines(method(3, 1, 2), architecture=architecture, enforce_eager=enforce_eager, **ROOMY)
        _, metrics = complete(llm, PROMPTS[: len(IGNORING_ENDS)], IGNORING_ENDS)
        drafted, accepted = counts(metrics)
        assert 0 < accepted < drafted
        drafts.append(sorted((record.request_id, record.drafts) for record in metrics.records))
    assert drafts[0] == drafts[1]


@pytest.mark.parametrize("architecture", [{}, FAMILIES["deepseek_v3"]], ids=["llama", "latent"])
def test_captured_steps_of_a_gpu_draft_what_the_cpu_does(
    engines: Engines, emulated_gpu: EmulatedDevice, architecture: dict[str, Any]
) -> None:
    found = []
    for build, options in ((engines, SMALL), (Engines(), GPU)):
        llm = build(method(2, 1, 1), **{**options, "architecture": {**architecture, **options["architecture"]}})
        done, metrics = complete(llm, PROMPTS[4:6], [replace(own, max_tokens=7) for own in IGNORING_ENDS[:2]])
        drafted, accepted = counts(metrics)
        assert 0 < accepted < drafted
        found.append((answers(done), sorted((record.request_id, record.drafts) for record in metrics.records)))
    assert found[0] == found[1] and emulated_gpu.num_replays > 0


def test_a_longer_memory_guesses_better(engines: Engines) -> None:
    shares = []
    for num_recent in (1, 40, 200):
        llm = engines(method(4, 0, num_recent), **ROOMY)
        _, metrics = complete(llm, PROMPTS[: len(IGNORING_ENDS)], IGNORING_ENDS)
        drafted, accepted = counts(metrics)
        shares.append(accepted / drafted)
    assert shares[0] < shares[1] < shares[2] == 1


def test_nothing_is_held_beside_the_target(engines: Engines) -> None:
    engine = engines(method(4, 16, 512), **ROOMY).engine
    proposer, target = engine.proposer, engine.target
    assert isinstance(proposer, SparseKVProposer) and proposer.cache_bytes_per_block == 0
    assert proposer.runner.cache is target.cache and proposer.runner.model.layers == target.model.layers
    assert proposer.kept == KeptContext(num_first_blocks=1, num_recent_tokens=512, block_size=BLOCK_SIZE)


REFUSED = {
    "transformers' own code": (
        {"model_type": "cohere"},
        r"method=sparse_kv drafts with all layers of dummy, which must run on our own decoder; this cohere runs",
    ),
    "layers with states": (FAMILIES["qwen3_5_text"], r"method=sparse_kv must have attention in all layers of dummy"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_a_target_whose_layers_cannot_draft_is_refused(engines: Engines, case: str) -> None:
    architecture, words = REFUSED[case]
    with pytest.raises(UserError, match=words):
        engines(method(4, 16, 512), architecture=architecture)


def test_a_hybrid_hands_both_numbers_on() -> None:
    keys: dict[str, Any] = {"method": "hybrid", "drafter": "sparse_kv"}
    parsed = parse_method({**keys, "num_sink_tokens": 0})[0]
    assert isinstance(parsed, HybridMethod)
    assert parsed.drafter_method() == SparseKVMethod(num_sink_tokens=0, num_speculative_tokens=4)
    with pytest.raises(ConfigError, match=r"num_sink_tokens is a key of drafter=sparse_kv, got 0 with drafter=eagle"):
        parse_method({**keys, "drafter": "eagle", "num_sink_tokens": 0})
