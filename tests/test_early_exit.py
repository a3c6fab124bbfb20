"""The target's first layers draft: logits against transformers', drafts that follow, a cache that stays the target's.

Drafts by all layers are the strongest test of all: each must be the target's own token, to the last bit of its noise.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, cast

import pytest
import torch

from proposers.early_exit import EarlyExitProposer
from runner.config import EarlyExitMethod, HybridMethod, MethodConfig, parse_method
from runner.config.problem import ConfigError
from runner.engine.errors import UserError
from runner.engine.forward_batch import ForwardBatch
from runner.engine.request import DraftTokens, Request
from runner.engine.sampling_params import SamplingParams
from runner.engine.schedule import Schedule
from runner.llm import LLM
from tests.assistant_checkpoints import LAYER_TYPES, LAYERS, NUM_LAYERS, NUM_LIKELY, TARGETS, VOCAB_SIZE
from tests.conftest import Engines, complete
from tests.other_families import FAMILIES
from tests.test_losslessness import PARAMS, PROMPTS, ROOMY, answers, counts
from tests.transformers_reference import (
    KeepFloat64,
    assert_as_accurate,
    in_float64,
    random_model,
    random_sequences,
    save_tokenizer,
)

Logits = Callable[[Any, list[int], int], torch.Tensor]  # (model, text, layers) -> [vocab] behind its last token


def llama() -> Any:
    from transformers import LlamaConfig

    sizes = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 4}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "tie_word_embeddings": True}
    return random_model(LlamaConfig(vocab_size=VOCAB_SIZE, max_position_embeddings=128, **sizes, **heads, **NO_ENDS))


def gemma4() -> Any:
    """Its last two layers see keys and values of earlier ones, and each has inputs of its own."""
    from transformers import Gemma4TextConfig

    layers = {"num_hidden_layers": NUM_LAYERS, "layer_types": LAYER_TYPES, **TARGETS["shared"]}
    sizes = {"hidden_size": 64, "intermediate_size": 96}
    return random_model(Gemma4TextConfig(**copy.deepcopy({**LAYERS, **sizes, **layers})))


NO_ENDS: dict[str, Any] = {"bos_token_id": None, "eos_token_id": None, "pad_token_id": None}


@torch.inference_mode()
def of_a_smaller_model(model: Any, text: list[int], num_layers: int) -> torch.Tensor:
    """With the same weights, as transformers' assistant_early_exit has it."""
    config = copy.deepcopy(model.config)
    config.num_hidden_layers = num_layers
    with torch.device("meta"):
        smaller = type(model)(config)
    weights = {name: value for name, value in model.state_dict().items() if name in smaller.state_dict()}
    smaller.load_state_dict(weights, assign=True)
    smaller.model.rotary_emb = model.model.rotary_emb
    smaller.tie_weights()
    return smaller.eval()(torch.tensor([text]), use_cache=False).logits[0, -1]


@torch.inference_mode()
def of_a_hidden_state(model: Any, text: list[int], num_layers: int) -> torch.Tensor:
    """Through the model's own norm and head: whose keys a layer sees goes by how many layers there are."""
    output = model.model(torch.tensor([text]), output_hidden_states=True, use_cache=False)
    if num_layers == model.config.num_hidden_layers:  # normed already
        return model.lm_head(output.last_hidden_state[0, -1])
    return model.lm_head(model.model.norm(output.hidden_states[num_layers][0, -1]))


TARGET_MODELS: dict[str, tuple[Callable[[], Any], Logits]] = {
    "llama": (llama, of_a_smaller_model),
    "gemma4": (gemma4, of_a_hidden_state),
}


def method(num_speculative_tokens: int, exit_layer: int | None = None, **keys: Any) -> dict[str, Any]:
    return {
        "method": "early_exit", "num_speculative_tokens": num_speculative_tokens, "exit_layer": exit_layer, **keys,
    }  # fmt: skip


def proposer_of(llm: LLM) -> EarlyExitProposer:
    return cast(EarlyExitProposer, llm.engine.proposer)


def record_logits(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> dict[tuple[int, ...], torch.Tensor]:
    """What will be drafted by, [vocab] behind each text: what was committed, and drafts."""
    seen: dict[tuple[int, ...], torch.Tensor] = {}
    paths: dict[str, list[int]] = {}
    proposer = proposer_of(llm)
    first, following = proposer.first_logits, proposer.next_logits

    def first_logits(requests: Sequence[Request]) -> torch.Tensor:
        paths.update({each.request_id: each.tokens_between(0, each.num_tokens) for each in requests})
        return noted(requests, first(requests))

    def next_logits(requests: Sequence[Request], step: int, token_ids: torch.Tensor, row_idx: Any) -> torch.Tensor:
        for request, token in zip(requests, token_ids.tolist(), strict=True):
            paths[request.request_id].append(token)
        return noted(requests, following(requests, step, token_ids, row_idx))

    def noted(requests: Sequence[Request], logits: torch.Tensor) -> torch.Tensor:
        for request, row in zip(requests, logits, strict=True):
            seen[tuple(paths[request.request_id])] = row.clone()
        return logits

    monkeypatch.setattr(proposer, "first_logits", first_logits)
    monkeypatch.setattr(proposer, "next_logits", next_logits)
    return seen


@pytest.mark.parametrize(("kind", "exit_layer"), [("llama", 1), ("llama", 3), ("gemma4", 5)])
def test_drafts_are_by_the_logits_of_the_first_layers_and_steps_by_the_drafts(
    kind: str, exit_layer: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of each drafted token, in ragged batches, behind texts that are shorter and longer than gemma4's window."""
    make, logits_of = TARGET_MODELS[kind]
    model = make()
    model.get_input_embeddings().weight.data[NUM_LIKELY:] *= 0.1  # so that drafts are right now and then
    model.save_pretrained(tmp_path)
    save_tokenizer(tmp_path, VOCAB_SIZE)
    options: dict[str, Any] = {"device": "cpu", "dtype": "float32", "max_num_seqs": 2, "max_num_batched_tokens": 32}
    greedy = method(3, exit_layer, draft_sample_method="greedy")  # of a target that draws, so that texts wander
    llm = LLM(str(tmp_path), speculative_config=greedy, enforce_eager=True, **options)
    seen = record_logits(llm, monkeypatch)
    prompts = [{"prompt_token_ids": s.prompt} for s in random_sequences(VOCAB_SIZE, ((2, 0), (40, 0), (5, 0)))]
    params = SamplingParams(temperature=0.6, max_tokens=14, seed=3, ignore_eos=True)
    requests, metrics = complete(llm, prompts, [params] * len(prompts))
    plain, _ = complete(LLM(str(tmp_path), **options), prompts, [params] * len(prompts))
    assert answers(requests) == answers(plain)

    chosen = list(seen)[::2]
    assert len(chosen) > 20
    ours = torch.stack([seen[text] for text in chosen])
    theirs = torch.stack([logits_of(model, list(text), exit_layer) for text in chosen])
    with KeepFloat64():
        exact_model = in_float64(model)
        exact = torch.stack([logits_of(exact_model, list(text), exit_layer) for text in chosen])
    assert_as_accurate(ours, theirs, exact)

    accepted = set[int]()
    for request, record in zip(requests, sorted(metrics.records, key=lambda own: int(own.request_id)), strict=True):
        text, end = [*request.prompt_token_ids, *request.output_token_ids], request.num_prompt_tokens
        for step, gained in enumerate(record.tokens_per_step):
            before, count = list(text[:end]), record.num_draft_tokens[step]
            for _ in range(count):
                before.append(int(seen[tuple(before)].argmax()))
            right = [ours == true for ours, true in zip(before[end:], text[end:], strict=False)]
            num_right = next((place for place, is_right in enumerate(right) if not is_right), len(right))
            assert (record.num_accepted_tokens[step], gained) == (num_right, num_right + 1)
            accepted.add(num_right)
            end += gained
    assert 0 in accepted and max(accepted) > 0


IGNORING_ENDS = [
    SamplingParams(temperature=temperature, top_p=0.95, seed=index, max_tokens=12 + 5 * index, ignore_eos=True)
    for index, temperature in enumerate((0.0, 0.8, 0.0, 1.2, 1.0, 0.0))
]
ALL_LAYERS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {  # keys of the method, and of the engine
    "strict": ({"exit_layer": 2}, {}),
    "probabilistic": ({"exit_layer": 2, "rejection_sample_method": "probabilistic"}, {}),
    "block": ({"exit_layer": 2, "rejection_sample_method": "block"}, {}),
    "in parts": ({"exit_layer": 2}, {"enforce_eager": True}),
    "layers that see keys of earlier ones": ({"exit_layer": 4}, {"architecture": FAMILIES["gemma4_text"]}),
    "a latent, and experts": ({"exit_layer": 2}, {"architecture": FAMILIES["deepseek_v3"]}),
    "bfloat16": ({"exit_layer": 2}, {"dtype": "bfloat16"}),
}


@pytest.mark.parametrize("case", ALL_LAYERS)
def test_drafts_by_all_layers_are_all_accepted(engines: Engines, case: str) -> None:
    keys, engine_args = ALL_LAYERS[case]
    llm = engines(method(4, **keys), **engine_args, **ROOMY)
    requests, metrics = complete(llm, PROMPTS[: len(IGNORING_ENDS)], IGNORING_ENDS)
    for record in metrics.records:
        left = len(record.token_ids) - 1  # behind the one that a prompt brings
        expected = [1, *[5] * (left // 5), *([left % 5] if left % 5 else [])]
        assert list(record.tokens_per_step) == expected
        assert record.num_accepted_tokens == record.num_draft_tokens
    drafted, accepted = counts(metrics)
    assert drafted == accepted > 0
    if keys.get("rejection_sample_method") is None:
        plain, _ = complete(engines(**engine_args, **ROOMY), PROMPTS[: len(IGNORING_ENDS)], IGNORING_ENDS)
        assert answers(requests) == answers(plain)


def test_drafts_by_all_layers_are_all_accepted_behind_chunks_preemption_and_what_was_found(engines: Engines) -> None:
    """As long as a draft has blocks; prompts come twice."""
    llm = engines(method(4, 2), num_gpu_blocks_override=10, max_num_seqs=5, max_num_batched_tokens=47)
    prompts, params = PROMPTS[: len(IGNORING_ENDS)] * 2, IGNORING_ENDS * 2
    requests, metrics = complete(llm, prompts, params)
    drafted, accepted = counts(metrics)
    assert drafted == accepted > 100
    assert any(request.num_preemptions for request in requests)
    assert any(request.num_cached_tokens for request in requests)


def spoil_what_drafts_wrote(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    """Check what each call of `propose` writes, and overwrite all places behind what has been verified."""
    proposer, cache, stored = proposer_of(llm), llm.engine.target.cache, set[int]()
    propose, compute, block_size = proposer.propose, proposer.runner.compute, llm.engine.target.block_size
    assert cache is not None

    def noting(batch: ForwardBatch, *args: Any) -> Any:
        stored.update(batch.slot_mapping.tolist())
        return compute(batch, *args)

    def spoiling(schedule: Schedule) -> DraftTokens:
        above = [layer.clone() for layer in cache.layers[proposer.exit_layer :]]
        stored.clear()
        drafts = propose(schedule)
        own, behind = set[int](), list[int]()
        for item, count in zip(schedule.decoding, drafts.num_draft_tokens, strict=True):
            places = range(item.request.num_tokens - 1, len(item.request.block_table) * block_size)
            slots = [item.request.block_table[at // block_size] * block_size + at % block_size for at in places]
            own.update(slots[:count])
            behind += slots
        assert {slot for slot in stored if slot >= block_size} == own, "but for rows of nobody, in the null block"
        assert all(map(torch.equal, above, cache.layers[proposer.exit_layer :]))
        for layer in cache.layers:
            layer.flatten(0, 1)[behind] = 1e3
        return drafts

    monkeypatch.setattr(proposer.runner, "compute", noting)
    monkeypatch.setattr(proposer, "propose", spoiling)


def test_drafts_write_behind_what_was_verified_alone_and_nobody_reads_what_they_leave_there(
    engines: Engines, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nor anything else that stands there: drafts of earlier steps, of which other tokens were verified, or fewer."""
    prompts, params = [*PROMPTS, *PROMPTS[7:9]], [*PARAMS, *PARAMS[3:5]]
    plain, _ = complete(engines(**ROOMY), prompts, params)
    schedule = {"num_gpu_blocks_override": 10, "max_num_seqs": 6, "max_num_batched_tokens": 47}
    llm = engines(method(4), enforce_eager=True, **schedule)
    spoil_what_drafts_wrote(llm, monkeypatch)
    requests, metrics = complete(llm, prompts, params)
    assert answers(requests) == answers(plain)
    drafted, accepted = counts(metrics)
    assert 0 < accepted < drafted
    assert any(request.num_preemptions for request in requests)
    assert any(request.num_cached_tokens for request in requests)


def test_nothing_is_held_beside_the_target(engines: Engines) -> None:
    engine = engines(method(4), **ROOMY).engine
    proposer, target = engine.proposer, engine.target
    assert isinstance(proposer, EarlyExitProposer) and proposer.cache_bytes_per_block == 0
    runner = proposer.runner
    assert runner.cache is target.cache and runner.shapes is target.shapes and runner.graphs is not target.graphs
    assert runner.model.layers == target.model.layers[:1] and runner.model.lm_head is target.model.lm_head


@pytest.mark.parametrize(("num_layers", "expected"), [(1, 1), (3, 1), (4, 1), (8, 2)])
def test_a_quarter_of_the_layers_drafts_by_default(engines: Engines, num_layers: int, expected: int) -> None:
    """As LayerSkip's authors run 16 and 32 of them."""
    llm = engines(method(2), architecture={"num_hidden_layers": num_layers})
    assert proposer_of(llm).exit_layer == expected


# What is refused -> (keys of the method, of the target, words of the reason and the remedy)
REFUSED: dict[str, tuple[dict[str, Any], dict[str, Any], str]] = {
    "more layers than there are": (
        {"exit_layer": 3}, {}, r"speculative_config\.exit_layer must be <= 2, the layers of dummy, got 3; lower it"
    ),
    "transformers' own code": (
        {},
        {"model_type": "cohere"},
        r"first layers of dummy, which must run on our own decoder; this cohere runs through transformers' code",
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", REFUSED)
def test_a_target_whose_layers_cannot_draft_is_refused(engines: Engines, case: str) -> None:
    keys, architecture, words = REFUSED[case]
    with pytest.raises(UserError, match=words):
        engines(method(4, **keys), architecture=architecture)


def test_a_hybrid_hands_the_exit_on_and_takes_no_checkpoint_for_it(tmp_path: Path) -> None:
    keys: dict[str, Any] = {"method": "hybrid", "drafter": "early_exit"}
    parsed = parse_method({**keys, "exit_layer": 3, "draft_sample_method": "greedy"})[0]
    assert isinstance(parsed, HybridMethod)
    expected: MethodConfig = EarlyExitMethod(exit_layer=3, num_speculative_tokens=4, draft_sample_method="greedy")
    assert parsed.drafter_method() == expected
    with pytest.raises(
        ConfigError, match=r"model is a key of drafter=draft_model or .*, got 'tiny-eagle' with drafter"
    ):
        parse_method({**keys, "model": "tiny-eagle"})
    with pytest.raises(ConfigError, match=r"exit_layer is a key of drafter=early_exit, got 3 with drafter=eagle"):
        parse_method({**keys, "drafter": "eagle", "exit_layer": 3})
