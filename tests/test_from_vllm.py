"""A vLLM user's speculative_config: every key of its schema is implemented, noted or refused, none is passed over."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from runner.config import (
    ConfigError,
    DraftModelMethod,
    EagleMethod,
    MedusaMethod,
    NgramMethod,
    SpeculativeConfig,
    SuffixMethod,
    parse_method,
)
from runner.config.method_union import FIELDS, METHODS
from runner.config.vllm_keys import (
    KEYS_WITHOUT_EFFECT,
    ONE_PASS_KEY,
    REFUSED_KEYS,
    RENAMED_KEYS,
    UNAVAILABLE_METHODS,
)
from runner.llm import LLM

# The fields of vllm/config/speculative.py 0.33, and those of 0.8 that are gone since.
_VLLM_FIELDS = """
    enforce_eager num_speculative_tokens model method draft_tensor_parallel_size tensor_parallel_size quantization
    moe_backend attention_backend kv_cache_dtype max_model_len revision code_revision index_share_for_mtp_iteration
    disable_padded_drafter_batch disable_eagle_block_drop disable_lookahead_block_hashes draft_lm_head_quantization
    use_local_argmax_reduction use_heterogeneous_vocab prompt_lookup_max prompt_lookup_min parallel_drafting
    num_speculative_tokens_per_batch_size suffix_decoding_max_tree_depth suffix_decoding_max_cached_requests
    suffix_decoding_max_spec_factor suffix_decoding_min_token_prob draft_load_config rejection_sample_method
    synthetic_acceptance_rates synthetic_acceptance_length enable_adaptive_verification draft_sample_method
    dspark_draft_topk xpress_topc fly_window_size fly_entropy_threshold fly_entropy_top_k target_model_config
    target_parallel_config draft_model_config draft_parallel_config
    acceptance_method disable_logprobs disable_mqa_scorer disable_by_batch_size posterior_threshold posterior_alpha
    disable_log_stats speculative_token_tree synthetic_acceptance_rate
"""
VLLM_FIELDS = _VLLM_FIELDS.split()
SEEDS = [  # the examples of vLLM's documentation
    {"method": "draft_model", "model": "d", "num_speculative_tokens": 5},
    {"method": "draft_model", "model": "d", "num_speculative_tokens": 3, "use_heterogeneous_vocab": True},
    {"method": "ngram", "num_speculative_tokens": 4, "prompt_lookup_min": 2, "prompt_lookup_max": 5},
    {
        "method": "suffix",
        "num_speculative_tokens": 8,
        "suffix_decoding_max_tree_depth": 24,
        "suffix_decoding_max_cached_requests": 10000,
        "suffix_decoding_max_spec_factor": 1.0,
        "suffix_decoding_min_token_prob": 0.1,
    },
    {"method": "suffix", "num_speculative_tokens": 32},
]


def refusal(**values: Any) -> str:
    with pytest.raises(ConfigError) as raised:
        parse_method({"method": "ngram"} | values)
    return str(raised.value)


def notes(**values: Any) -> tuple[str, ...]:
    return parse_method({"method": "ngram"} | values)[1]


@pytest.mark.parametrize("key", VLLM_FIELDS)
def test_every_key_of_vllm_is_implemented_noted_or_refused(key: str) -> None:
    implemented = any(key in fields for fields in FIELDS.values())
    ways = [set(KEYS_WITHOUT_EFFECT), set(REFUSED_KEYS), set(RENAMED_KEYS), {ONE_PASS_KEY}]
    assert implemented + sum(key in way for way in ways) == 1


def test_older_spellings_lead_to_keys_that_something_is_known_about() -> None:
    known = {key for fields in FIELDS.values() for key in fields} | set(KEYS_WITHOUT_EFFECT) | set(REFUSED_KEYS)
    assert set(RENAMED_KEYS.values()) <= known


@pytest.mark.parametrize("config", SEEDS)
def test_the_examples_of_vllms_documentation_pass_unchanged_and_without_a_word(config: dict[str, Any]) -> None:
    method, found = parse_method(config)
    assert found == ()
    assert {key: getattr(method, key) for key in config} == config


@pytest.mark.parametrize("key", VLLM_FIELDS)
def test_null_is_vllms_default_for_every_key(key: str) -> None:
    assert parse_method({"method": "ngram"} | ({} if key == "method" else {key: None})) == (NgramMethod(), ())


@pytest.mark.parametrize(
    ("old", "today"),
    [
        ({"speculative_model": "d", "num_speculative_tokens": 3}, {"method": "draft_model", "model": "d",
                                                                   "num_speculative_tokens": 3}),
        ({"speculative_model": "[ngram]", "ngram_prompt_lookup_max": 4, "ngram_prompt_lookup_min": 2},
         {"method": "ngram", "prompt_lookup_max": 4, "prompt_lookup_min": 2}),
        ({"method": "[ngram]"}, {"method": "ngram"}),
        ({"method": "deepseek_mtp", "num_speculative_tokens": 3}, {"method": "mtp", "num_speculative_tokens": 3}),
        ({"method": "qwen3_next_mtp", "num_speculative_tokens": 1}, {"method": "mtp", "num_speculative_tokens": 1}),
        ({"model": "d", "num_speculative_tokens": 3, "parallel_drafting": True},
         {"method": "pard", "model": "d", "num_speculative_tokens": 3}),
        ({"method": "draft_model", "model": "d", "num_speculative_tokens": 3, "parallel_drafting": True},
         {"method": "pard", "model": "d", "num_speculative_tokens": 3}),
        ({"method": "pard2", "model": "d", "num_speculative_tokens": 3, "parallel_drafting": True},
         {"method": "pard", "model": "d", "num_speculative_tokens": 3}),
        ({"method": "ngram", "speculative_disable_by_batch_size": 4}, {"method": "ngram", "disable_by_batch_size": 4}),
        ({"model": "d", "num_speculative_tokens": 3, "speculative_max_model_len": 99},
         {"model": "d", "num_speculative_tokens": 3, "max_model_len": 99}),
        ({"model": "d", "num_speculative_tokens": 3, "speculative_draft_tensor_parallel_size": 1},
         {"model": "d", "num_speculative_tokens": 3, "draft_tensor_parallel_size": 1}),
        ({"model": "d", "num_speculative_tokens": 3, "draft_tensor_parallel_size": 8},
         {"model": "d", "num_speculative_tokens": 3, "draft_tensor_parallel_size": 1}),
        ({"method": "ngram", "acceptance_method": "rejection_sampler"},
         {"method": "ngram", "rejection_sample_method": "probabilistic"}),
        ({"method": "ngram", "rejection_sample_method": "standard"},
         {"method": "ngram", "rejection_sample_method": "probabilistic"}),
        ({"method": "ngram", "spec_decoding_acceptance_method": "typical_acceptance_sampler",
          "typical_acceptance_sampler_posterior_threshold": 0.2, "typical_acceptance_sampler_posterior_alpha": 0.4},
         {"method": "ngram", "rejection_sample_method": "typical", "posterior_threshold": 0.2, "posterior_alpha": 0.4}),
    ],
)  # fmt: skip
def test_older_and_newer_spellings_mean_what_they_meant_and_are_noted(
    old: dict[str, Any], today: dict[str, Any]
) -> None:
    method, found = parse_method(old)
    assert method == parse_method(today)[0]
    assert found
    assert all("is read as" in note for note in found)


def test_a_note_names_what_was_written_and_what_is_done() -> None:
    assert notes(acceptance_method="typical_acceptance_sampler") == (
        "speculative_config.acceptance_method='typical_acceptance_sampler' is read as rejection_sample_method",
        "speculative_config.rejection_sample_method='typical_acceptance_sampler' is read as 'typical'",
    )


def test_two_spellings_of_one_key_are_refused() -> None:
    text = refusal(prompt_lookup_max=4, ngram_prompt_lookup_max=5)
    assert (
        text == "speculative_config.ngram_prompt_lookup_max is an older name of prompt_lookup_max; give one of the two"
    )
    text = refusal(acceptance_method="rejection_sampler", spec_decoding_acceptance_method="rejection_sampler")
    assert "is an older name of rejection_sample_method" in text


@pytest.mark.parametrize("key", KEYS_WITHOUT_EFFECT)
def test_a_switch_without_effect_is_accepted_with_a_note_when_it_is_set(key: str) -> None:
    (note,) = notes(**{key: 3})
    assert note.startswith(f"speculative_config.{key}=3 changes nothing here: ")
    assert notes(**{key: False}) == ()


@pytest.mark.parametrize(
    ("key", "value"),
    [("max_model_len", 64), ("suffix_decoding_min_token_prob", 0.5), ("use_heterogeneous_vocab", True)],
)
def test_a_key_of_another_method_is_accepted_as_vllm_accepts_it(key: str, value: float) -> None:
    assert notes(**{key: value}) == (f"speculative_config.{key}={value} changes nothing with method=ngram",)


@pytest.mark.parametrize(("key", "value"), [("draft_tensor_parallel_size", 1), ("use_heterogeneous_vocab", False)])
def test_a_key_of_another_method_that_asks_for_nothing_is_not_worth_a_word(key: str, value: int) -> None:
    assert notes(**{key: value}) == ()


@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        ("tensor_parallel_size", 2, "is not a key of speculative_config, got 2; pass 'draft_tensor_parallel_size'"),
        ("temperature", 0.7, "is a sampling parameter, got 0.7; pass sampler.temperature, from Python SamplingParams("),
        ("top_p", 0.9, "is a sampling parameter, got 0.9; pass sampler.top_p"),
        ("speculative_ratio", 4, "is a sampling parameter, got 4; pass SamplingParams(speculative_ratio=...)"),
        ("target_model_config", {}, "is an internal field, got {}; vLLM fills it itself; remove it"),
        ("parallel_drafting", 1, "must be true or false, got 1"),
        ("speculative_token_tree", "[(0,)]", "is not available with method=ngram, got '[(0,)]'; remove it, its drafts"),
        ("rejection_sample_method", "fly", "is not available, got 'fly'; it is vLLM's own lossy rule; typical is"),
        ("prompt_lookup_mx", 3, "is an unknown key, got 3; did you mean 'prompt_lookup_max' or 'prompt_lookup_min'?"),
        ("gpu_memory_utilization", 0.9, "is an unknown key, got 0.9"),
        ("num_speculative_tokens", 999, "must be <= 128, got 999"),
    ],
)
def test_what_makes_no_sense_is_refused_with_the_remedy(key: str, value: Any, message: str) -> None:
    assert refusal(**{key: value}).startswith(f"speculative_config.{key} {message}")


@pytest.mark.parametrize("method", UNAVAILABLE_METHODS)
def test_a_method_that_is_not_available_yet_is_told_what_is(method: str) -> None:
    text = refusal(method=method, model="x")
    assert text.startswith(f"speculative_config.method {method!r}")
    assert text.endswith(f"is not available yet; available: {', '.join(METHODS)}")


@pytest.mark.parametrize("method", ["foo_mtp", "deepsek_mtp", "_mtp"])
def test_only_names_that_vllm_has_for_mtp_are_read_as_it(method: str) -> None:
    """Whatever ended in _mtp was taken for it, with a note as if vLLM knew the name."""
    assert refusal(method=method, num_speculative_tokens=2) == (
        f"speculative_config.method is none of vLLM's names of mtp, got {method!r}; give 'mtp', the method of every "
        "checkpoint of this kind"
    )


@pytest.mark.parametrize("method", ["eagle", "mtp", "medusa", "mlp_speculator"])
def test_drafters_that_go_token_by_token_refuse_to_draft_in_one_pass(method: str) -> None:
    text = refusal(method=method, parallel_drafting=True)
    assert text.startswith(f"speculative_config.parallel_drafting is not available with method={method}, got True")


def test_drafters_that_go_in_one_pass_need_not_be_told() -> None:
    for method in ("dflash", "dspark", "pard"):
        assert notes(method=method, num_speculative_tokens=3, parallel_drafting=True) == ()
    (note,) = notes(method="eagle3", num_speculative_tokens=3, parallel_drafting=True)
    assert "an EAGLE-3 checkpoint says itself whether it drafts in one pass" in note
    assert "must be true with method=pard, got False" in refusal(method="pard", parallel_drafting=False)
    assert notes(parallel_drafting=True) == (
        "speculative_config.parallel_drafting=True changes nothing with method=ngram",
    )


def test_a_tree_may_be_written_as_older_releases_wrote_it() -> None:
    tree = "[(0, 0), (0,), (1,), (0, 0, 0)]"
    method, _ = parse_method({"method": "eagle", "num_speculative_tokens": 4, "speculative_token_tree": tree})
    assert isinstance(method, EagleMethod)
    assert method.speculative_token_tree == ((0,), (1,), (0, 0), (0, 0, 0))  # level by level, as it sorted them
    paths = [[0], [0, 0], [1]]
    method, _ = parse_method({"method": "medusa", "num_speculative_tokens": 3, "speculative_token_tree": paths})
    assert isinstance(method, MedusaMethod)
    assert method.speculative_token_tree == ((0,), (0, 0), (1,))
    assert "must be null, dynamic or paths" in refusal(method="eagle", speculative_token_tree="[(0,")


@pytest.mark.parametrize("method", ["token_recycling", "eagle3"])
def test_null_in_place_of_a_tree_asks_for_a_chain(method: str) -> None:
    found, notes = parse_method({"method": method, "num_speculative_tokens": 3, "speculative_token_tree": None})
    assert getattr(found, "speculative_token_tree", "none") is None and notes == ()


def test_an_available_method_is_not_called_unavailable() -> None:
    assert not set(METHODS) & set(UNAVAILABLE_METHODS)


def test_all_that_is_wrong_is_said_at_once() -> None:
    with pytest.raises(ConfigError) as raised:
        SpeculativeConfig.from_engine_args(
            "tiny", {"method": "ngram", "temperature": 1, "tensor_parallel_size": 2, "foo": 3}, dtype="f32"
        )
    assert [problem.name for problem in raised.value.problems] == [
        "speculative_config.tensor_parallel_size",
        "speculative_config.temperature",
        "speculative_config.foo",
        "dtype",
    ]


def test_suffix_takes_its_draft_length_from_the_tree_depth_as_vllm_does() -> None:
    method, found = parse_method({"method": "suffix", "suffix_decoding_max_tree_depth": 16})
    assert isinstance(method, SuffixMethod)
    assert method.num_speculative_tokens == 16
    assert found == ("num_speculative_tokens=16 comes from suffix_decoding_max_tree_depth=16, as in vLLM",)


@pytest.mark.parametrize(
    "name",
    [
        *("draft_model", "pard", "eagle", "eagle3", "mtp", "medusa", "mlp_speculator", "dflash", "dspark"),
        *("early_exit", "sparse_kv"),
    ],
)
def test_probabilistic_drafts_bring_vllms_default_rule_along_unless_a_rule_is_named(name: str) -> None:
    """Under strict they would be accepted with probability sum(p * q), far below what vLLM does with the same JSON."""
    config = {"method": name, "num_speculative_tokens": 3, "draft_sample_method": "probabilistic"}
    if name not in ("early_exit", "sparse_kv"):  # which draft with the target
        config["model"] = "d"
    method, found = parse_method(config)
    assert method.rejection_sample_method == "probabilistic"
    assert found == ("rejection_sample_method=probabilistic comes with draft_sample_method=probabilistic, as in vLLM",)
    method, found = parse_method(config | {"rejection_sample_method": "strict"})
    assert (method.rejection_sample_method, found) == ("strict", ())


@pytest.mark.parametrize(("rule", "num_words"), [("standard", 2), ("block", 1), ("strict", 0)])
def test_a_rule_that_reads_the_drafts_distribution_says_that_drafts_are_drawn_which_vllm_picks_greedily(
    rule: str, num_words: int
) -> None:
    config = {"method": "eagle3", "model": "d", "num_speculative_tokens": 3, "rejection_sample_method": rule}
    method, found = parse_method(config)
    assert len(found) == num_words
    if found:
        assert method.draft_sample_method == "probabilistic"
        assert found[-1].endswith("vLLM's default is draft_sample_method=greedy, name it to have that")
    named = [parse_method(config | {"draft_sample_method": way})[1] for way in ("greedy", "probabilistic")]
    tree = parse_method(config | {"speculative_token_tree": "dynamic"})[1]  # its candidates are greedy ones
    assert not any("draft_sample_method" in note for notes in (*named, tree) for note in notes)


@pytest.mark.parametrize(
    ("method", "config", "expected"),
    [
        ("eagle3", {"speculators_config": {"proposal_methods": [{"speculative_tokens": 5}]}}, 5),
        ("mlp_speculator", {"model_type": "mlp_speculator", "n_predict": 3}, 3),
        ("mtp", {"model_type": "mimo", "num_nextn_predict_layers": 1}, 1),
        ("dspark", {"architectures": ["Qwen3DSparkModel"], "block_size": 6, "dspark_block_size": 9}, 6),
        ("dspark", {"markov_rank": 4, "dspark_block_size": 6, "n_predict": 2}, 6),
        ("dspark", {"markov_rank": 4, "block_size": 9, "dflash_config": {"block_size": 6}}, 6),
        ("dspark", {"markov_rank": 4, "block_size": 6, "sample_from_anchor": False}, 5),
        ("eagle", {"speculators_config": {"proposal_methods": []}}, None),
        ("dflash", {"n_predict": "many"}, None),
    ],
)
def test_an_omitted_number_of_tokens_is_the_checkpoints_as_in_vllm_or_a_default_that_is_told(
    tmp_path: Path, method: str, config: dict[str, Any], expected: int | None
) -> None:
    (tmp_path / "config.json").write_text(json.dumps(config))
    given = {"method": method, "model": str(tmp_path)}
    parsed, (note,) = parse_method(given)
    if expected is None:
        assert note == (
            f"num_speculative_tokens is not given and is {4 if method == 'eagle' else 7}, the default here; vLLM takes "
            "what the draft's config says"
        )
    else:
        assert parsed.num_speculative_tokens == expected
        assert note == f"num_speculative_tokens={expected} comes from the config.json of {tmp_path}, as in vLLM"
    assert parse_method({**given, "num_speculative_tokens": 2})[1] == ()


def test_a_configuration_remembers_what_it_was_made_of() -> None:
    given = {"speculative_model": "tiny-draft", "num_speculative_tokens": 3, "moe_backend": "triton"}
    config = SpeculativeConfig.from_engine_args("tiny", given)
    assert isinstance(config.method, DraftModelMethod)
    assert config.speculative_config == given
    assert len(config.notes()) == 2
    assert SpeculativeConfig.parse(config.model_dump()) == config


def test_the_same_method_from_either_side_is_the_same_run() -> None:
    given = SpeculativeConfig.from_engine_args("tiny", {"model": "ngram", "moe_backend": "triton"})
    named = SpeculativeConfig.parse({"model": {"model": "tiny"}, "method": {"method": "ngram"}})
    assert given != named
    assert given.normalised() == named.normalised()


@pytest.mark.parametrize("method", [{"method": "ngram", "num_speculative_tokens": 3}, {"method": "ngrm"}])
def test_a_method_beside_a_speculative_config_must_be_the_same(method: dict[str, Any]) -> None:
    values = {"model": {"model": "tiny"}, "speculative_config": {"method": "ngram"}}
    SpeculativeConfig.parse(values | {"method": {"method": "ngram"}})
    with pytest.raises(ConfigError, match=r"^speculative_config excludes another method"):
        SpeculativeConfig.parse(values | {"method": method})


def test_problems_across_nodes_name_the_speculative_config() -> None:
    with pytest.raises(ConfigError, match=r"^speculative_config\.max_model_len must be <= max_model_len \(64\)"):
        SpeculativeConfig.from_engine_args("t", {"model": "d", "max_model_len": 65}, max_model_len=64)


def test_python_warns_in_its_own_terms_of_what_is_read_otherwise_than_it_was_written() -> None:
    """They were the command line's: hardware.enforce_eager decides."""
    with pytest.warns(UserWarning, match=r"\.enforce_eager=True changes nothing here: enforce_eager decides"):
        LLM("tiny", speculative_config={"method": "ngram", "enforce_eager": True}, device="cpu")
