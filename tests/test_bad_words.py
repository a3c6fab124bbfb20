"""Bad words and allowed tokens: which logits of a row are masked, drafts counted in, and how words are spelled."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from runner.engine.block_manager import BlockManager
from runner.engine.refusal import refusal
from runner.engine.request import Request
from runner.engine.sampling import SamplingRows, process_logits
from runner.engine.sampling_params import SamplingParams
from runner.engine.stopping import StopRules
from runner.tiny import TARGET_DIR
from runner.tokenizer import Tokenizer
from tests.no_readback import NoReadback

VOCAB_SIZE = 4
TOKENS = st.lists(st.integers(0, VOCAB_SIZE - 1), max_size=4)
WORDS = st.lists(st.lists(st.integers(0, VOCAB_SIZE - 1), min_size=1, max_size=4), max_size=4)
REQUESTS = st.lists(st.tuples(TOKENS, TOKENS, WORDS), min_size=1, max_size=3)  # output, drafts, bad words


def make_request(output: list[int], bad_words: list[list[int]], **params: object) -> Request:
    return Request(
        request_id="0",
        prompt_token_ids=[0, 1, 2, 3],
        sampling_params=SamplingParams(bad_words=("x",) if bad_words else (), **params),  # type: ignore[arg-type]
        seed=0,
        output_token_ids=list(output),
        bad_words_token_ids=tuple(map(tuple, bad_words)),
    )


def processed(requests: list[Request], drafts: list[list[int]]) -> torch.Tensor:
    """Zeros but for what is masked, a row for each draft and the one behind."""
    widest = max(map(len, drafts))
    padded = [draft + [-1] * (widest - len(draft)) for draft in drafts]
    request_idx = [b for b, draft in enumerate(drafts) for _ in range(len(draft) + 1)]
    rows = SamplingRows.build(
        requests,
        request_idx,
        [n for draft in drafts for n in range(len(draft) + 1)],
        torch.tensor(padded, dtype=torch.int64) if widest else None,
        vocab_size=VOCAB_SIZE,
        eos_token_ids=(),
        device="cpu",
    )
    return process_logits(torch.zeros(len(request_idx), VOCAB_SIZE), rows)


def masked_tokens(history: list[int], bad_words: list[list[int]]) -> set[int]:
    """The definition: tokens that would make the history end with a bad word."""
    return {word[-1] for word in bad_words if [*history, word[-1]][-len(word) :] == word}


@settings(max_examples=300)
@given(REQUESTS)
def test_a_token_is_masked_iff_it_would_complete_a_bad_word(
    cases: list[tuple[list[int], list[int], list[list[int]]]],
) -> None:
    requests = [make_request(output, words) for output, _, words in cases]
    logits = processed(requests, [draft for _, draft, _ in cases])
    histories = [(output + draft[:n], words) for output, draft, words in cases for n in range(len(draft) + 1)]
    for row, (history, words) in zip(logits.tolist(), histories, strict=True):
        masked = {token for token, logit in enumerate(row) if logit == float("-inf")}
        assert masked == masked_tokens(history, words)
        assert all(logit == 0.0 for token, logit in enumerate(row) if token not in masked)


def test_a_bad_word_does_not_begin_in_the_prompt() -> None:
    """As in vLLM: the prompt, which ends with 2, 3, is not the request's own words."""
    assert torch.isfinite(processed([make_request([], [[3, 1], [2, 3, 0]])], [[]])).all()


def test_a_draft_that_is_none_completes_nothing() -> None:
    """-1 stands where a request has fewer drafts than its neighbour."""
    long, short = make_request([], [[1, 1, 2]]), make_request([1], [[1, 2], [1, 1, 2]])
    logits = processed([long, short], [[1, 1], []])
    assert [set(torch.where(row.isinf())[0].tolist()) for row in logits] == [set(), set(), {2}, {2}]


@given(st.lists(st.lists(st.integers(0, VOCAB_SIZE - 1), min_size=1) | st.none(), min_size=1, max_size=4))
def test_all_tokens_but_the_allowed_ones_are_masked(allowed: list[list[int] | None]) -> None:
    requests = [make_request([], [], allowed_token_ids=token_ids) for token_ids in allowed]
    logits = processed(requests, [[0]] * len(requests))
    for row, token_ids in zip(logits, [a for a in allowed for _ in range(2)], strict=True):
        kept = set(torch.where(row == 0.0)[0].tolist())
        assert kept == (set(range(VOCAB_SIZE)) if token_ids is None else set(token_ids))


EOS, MAX_TOKENS = 0, 4
ENDLESS_WORDS = st.lists(  # eos at most as their last token
    st.tuples(st.lists(st.integers(1, VOCAB_SIZE - 1), max_size=2), st.integers(0, VOCAB_SIZE - 1)).map(
        lambda word: [*word[0], word[1]]
    ),
    max_size=12,
)


def comes_to_a_dead_end(request: Request, said: tuple[int, ...] = ()) -> bool:
    """Whether an output that the masks allow leaves nothing to say: goes through all of them."""
    params, words = request.sampling_params, [list(word) for word in request.bad_words_token_ids]
    forbidden = masked_tokens(list(said), words) | ({EOS} if len(said) < params.min_tokens else set())
    left = set(range(VOCAB_SIZE) if params.allowed_token_ids is None else params.allowed_token_ids) - forbidden
    if len(said) + 1 == params.max_tokens:
        return not left
    return not left or any(comes_to_a_dead_end(request, (*said, token)) for token in left)


@settings(max_examples=300)
@given(ENDLESS_WORDS, st.none() | st.lists(st.integers(0, VOCAB_SIZE - 1), min_size=1), st.integers(0, MAX_TOKENS))
def test_a_request_is_refused_iff_its_masks_may_leave_no_token(
    words: list[list[int]], allowed: list[int] | None, min_tokens: int
) -> None:
    """Such a row said token 0, which nobody had allowed: 0 is the argmax where all logits are -inf."""
    params = {"allowed_token_ids": allowed, "min_tokens": min_tokens, "max_tokens": MAX_TOKENS}
    request = make_request([], words, **params)
    reason = refusal(
        request,
        stop_rules=StopRules(eos_token_ids=frozenset({EOS}), max_model_len=64),
        vocab_size=VOCAB_SIZE,
        blocks=BlockManager(num_blocks=9, block_size=16),
    )
    assert (reason is not None) == comes_to_a_dead_end(request)


def test_words_are_compared_with_drafts_without_a_look_at_them() -> None:
    """A look from the host would wait for a GPU to finish the drafts."""
    requests = [make_request([1, 2], [[2, 3, 0], [1]]), make_request([], [[0, 1]], allowed_token_ids=[0, 3])]
    with NoReadback():  # type: ignore[no-untyped-call]
        processed(requests, [[3, 0], [0, 0, 3]])


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Tokenizer(TARGET_DIR)


def test_a_word_is_spelled_as_the_first_of_a_text_and_behind_a_space(tokenizer: Tokenizer) -> None:
    bare, spaced = tokenizer.spell_bad_words(["self"])
    assert tokenizer.decode(bare) == "self" and tokenizer.decode(spaced) == " self"
    assert tokenizer.spell_bad_words([" self"]) == (bare, spaced), "white space in front makes no difference"


def test_a_word_behind_a_space_token_is_spelled_once(tokenizer: Tokenizer) -> None:
    """A space that is a token of its own leaves the word spelled as it is without: forbidding that is enough."""
    for word in ("self", "1", "):\n", "x x", "Ω"):
        spellings = tokenizer.spell_bad_words([word])
        bare = tuple(tokenizer.encode(word)[1])
        spaced = tuple(tokenizer.encode(f" {word}")[1])
        assert spellings == ((bare, spaced) if len(bare) == len(spaced) and bare[0] != spaced[0] else (bare,))


@pytest.mark.parametrize("values", [{"bad_words": [""]}, {"bad_words": ["a", " "]}, {"allowed_token_ids": []}])
def test_a_word_or_a_choice_of_nothing_is_refused(values: dict[str, object]) -> None:
    (name,) = values
    with pytest.raises(ValueError, match=rf"^{name} must hold"):
        SamplingParams(**values)  # type: ignore[arg-type]


def test_none_is_no_bad_word_and_a_lone_string_is_one() -> None:
    assert SamplingParams(bad_words=None).bad_words == ()  # type: ignore[arg-type]
    assert SamplingParams(bad_words="self").bad_words == ("self",)  # type: ignore[arg-type]
