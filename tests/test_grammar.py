"""Masks and drafts of constrained output, piece by piece, against definitions that need no engine.

The tiny family's tokenizer (2048 tokens) with a vocabulary of 2050 rows, as checkpoints pad theirs.
"""

from __future__ import annotations

import json
import re
from itertools import pairwise
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from llguidance import LLMatcher
from torch import Tensor

from kernels.reference.sampling import apply_token_bitmask, condition_on_bitmask, unpack_bitmask
from proposers.base import draft_tokens_from_lists
from runner.engine.grammar import Grammar, GrammarCompiler
from runner.engine.grammar_store import GrammarStore
from runner.engine.request import DraftTokens, Request
from runner.engine.sampling import SamplingRows, draft_tokens, process_logits
from runner.engine.sampling_params import SamplingParams
from runner.engine.sampling_rows import BitmaskRows
from runner.engine.schedule import CommittedTokens, Schedule
from runner.engine.structured_outputs import StructuredOutputsParams
from runner.tiny import TARGET_DIR
from runner.tiny.tokenizer import load_tokenizer
from tests.decoding_steps import schedule_of, scheduled
from tests.test_sampling_statistics import assert_follows
from verifier.rejection_sampler import RejectionSampler

VOCAB_SIZE, EOS = 2050, 0
TOKENIZER = load_tokenizer(TARGET_DIR)
COMPILER = GrammarCompiler(TOKENIZER, vocab_size=VOCAB_SIZE, eos_token_ids=(EOS,))
SCHEMA = {
    "type": "object",
    "properties": {"ok": {"type": "boolean"}, "size": {"enum": ["small", "large"]}, "note": {"type": "string"}},
    "required": ["ok", "size", "note"],
    "additionalProperties": False,
}
FORMS = (
    StructuredOutputsParams(json=SCHEMA),
    StructuredOutputsParams(json=SCHEMA, disable_any_whitespace=True),
    StructuredOutputsParams(regex="(foo|bar[a-z]{0,4})+x?"),
    StructuredOutputsParams(choice=["return x", "return y", "raise", 'say "no"\n']),
    StructuredOutputsParams(grammar='start: ("a" | "bc" start "d") "e"?'),
)


def allowed(*grammars: Grammar, compiler: GrammarCompiler = COMPILER) -> list[set[int]]:
    bitmask = compiler.masks(grammars)
    return [set(row.nonzero()[:, 0].tolist()) for row in unpack_bitmask(bitmask, vocab_size=VOCAB_SIZE)]


def fresh_matcher(form: StructuredOutputsParams, token_ids: list[int]) -> LLMatcher:
    """A matcher that has seen these tokens at once and has never gone back."""
    sources = {
        "json": lambda: LLMatcher.grammar_from_json_schema(
            form.json, overrides={"whitespace_flexible": False} if form.disable_any_whitespace else None
        ),
        "regex": lambda: LLMatcher.grammar_from_regex(form.regex),
        "choice": lambda: "start: " + " | ".join(map(json.dumps, form.choice)),
        "grammar": lambda: form.grammar,
    }
    matcher = LLMatcher(COMPILER._start(), sources[form.kind](), log_level=0)
    assert matcher.consume_tokens(token_ids)
    return matcher


@settings(max_examples=30)
@given(form=st.sampled_from(FORMS), data=st.data())
def test_a_mask_is_every_token_that_may_come_next_whatever_was_guessed_before(
    form: StructuredOutputsParams, data: st.DataObject
) -> None:
    """Token by token against a fresh matcher; where a text is forced, llguidance allows one way to spell it."""
    grammar, committed = COMPILER.compile(form), []
    draw = st.integers(min_value=0, max_value=10**6)
    for _ in range(data.draw(st.integers(min_value=1, max_value=6))):
        for _ in range(data.draw(st.integers(min_value=0, max_value=4))):  # guesses that are taken back
            (options,) = map(sorted, allowed(grammar))
            grammar.push(options[data.draw(draw) % len(options)])
        grammar.unwind()
        (found,) = allowed(grammar)
        matcher = fresh_matcher(form, committed)
        valid = {v for v in range(TOKENIZER.vocab_size) if v != EOS and matcher.validate_tokens([v]) == 1}
        valid |= {EOS} if matcher.is_accepting() else set()
        assert found == valid or (len(found) == 1 and found < valid)
        options = sorted(found - {EOS})
        if not options:
            break
        if data.draw(st.booleans()):
            grammar.push(options[0])  # a commit takes guesses back by itself
        committed.append(options[data.draw(draw) % len(options)])
        grammar.commit(committed[-1:])
    assert grammar.error is None


@settings(max_examples=30)
@given(words=st.lists(st.text('abé"\\\n /', max_size=5), min_size=1, max_size=4, unique=True), data=st.data())
def test_a_choice_allows_what_begins_one_of_its_words(words: list[str], data: st.DataObject) -> None:
    """Against the words themselves, byte by byte."""
    grammar, text = COMPILER.compile(StructuredOutputsParams(choice=words)), b""
    spelling = [COMPILER._start().decode_bytes([v]) for v in range(TOKENIZER.vocab_size)]
    targets = [word.encode() for word in words]
    while True:
        (found,) = allowed(grammar)
        fitting = {
            v
            for v, piece in enumerate(spelling)
            if v != EOS and piece and any(target.startswith(text + piece) for target in targets)
        }
        fitting |= {EOS} if text in targets else set()
        assert found == fitting or (len(found) == 1 and found < fitting)
        token_id = data.draw(st.sampled_from(sorted(found)))
        if token_id == EOS:
            break
        grammar.commit([token_id])
        text += spelling[token_id]
    assert text in targets


def test_when_the_text_is_complete_only_its_end_may_follow_and_again() -> None:
    grammar = COMPILER.compile(StructuredOutputsParams(choice=["yes"]))
    for text, after in (("yes", {EOS}), (None, {EOS}), (None, {EOS})):
        grammar.commit(TOKENIZER.encode(text) if text else [EOS])
        assert allowed(grammar) == [after]
    assert grammar.error is None


@pytest.mark.parametrize(
    "form",
    [{"choice": ["a SPELLED b"]}, {"json": {"enum": ["a SPELLED b"]}}, {"regex": "a SPELLED b"}],
    ids=lambda form: next(iter(form)),
)
def test_a_text_does_not_end_where_its_form_spells_the_end_of_texts(form: dict[str, Any]) -> None:
    """Half of a form passed for a whole one."""
    spelled = TOKENIZER.decode([EOS])
    own = {"regex": re.escape(spelled)}.get(next(iter(form)), spelled)
    written = json.loads(json.dumps(form).replace("SPELLED", json.dumps(own)[1:-1]))
    grammar = COMPILER.compile(StructuredOutputsParams(**written))
    grammar.commit(TOKENIZER.encode('"a ' if "json" in form else "a "))
    assert allowed(grammar) == [{EOS}]
    assert grammar.error is not None and "it spells an end-of-text token, with which a text ends" in grammar.error


@pytest.mark.parametrize("form", [StructuredOutputsParams(regex="[0-9]+"), StructuredOutputsParams(choice=["12"])])
def test_a_model_of_several_end_of_text_tokens_may_use_any(form: StructuredOutputsParams) -> None:
    ends = {EOS, token("!")}
    compiler = GrammarCompiler(TOKENIZER, vocab_size=VOCAB_SIZE, eos_token_ids=tuple(ends))
    grammar = compiler.compile(form)
    grammar.commit(TOKENIZER.encode("12"))
    (found,) = allowed(grammar, compiler=compiler)
    assert ends <= found and token("a") not in found
    grammar.commit([token("!")])
    assert allowed(grammar, compiler=compiler) == [ends] and grammar.error is None


def test_a_guess_that_nothing_can_follow_fails_the_request_only_when_it_is_committed() -> None:
    """Else a draft would decide whether a request lives, and the matcher stays broken behind such a place."""
    form = StructuredOutputsParams(grammar='start: "x" ("a" NOTHING | "c")\nNOTHING: /[b]/ & /[d]/')

    def guessed(*committed: list[int]) -> Grammar:
        grammar = COMPILER.compile(form)
        grammar.commit([token("x")])
        grammar.push(token("a"))
        assert allowed(grammar) == [{EOS}]
        for token_ids in committed:
            grammar.commit(token_ids)
        return grammar

    spared = guessed()
    spared.unwind()
    assert spared.error is None and allowed(spared) == [{token("a"), token("c")}]
    assert guessed([token("c"), EOS]).error is None
    assert guessed([token("a")]).error is None  # it may have ended the text there, at a stop string
    plain = COMPILER.compile(form)
    plain.commit([token("x"), token("a")])
    assert allowed(plain) == [{EOS}]
    plain.commit([EOS])
    assert plain.error is not None and guessed([token("a"), EOS]).error == plain.error


def test_the_end_may_be_guessed_and_taken_back() -> None:
    grammar = COMPILER.compile(StructuredOutputsParams(regex="[0-9]{2,4}"))
    grammar.commit(TOKENIZER.encode("12"))
    before = allowed(grammar)
    assert EOS in before[0] and len(before[0]) > 1
    grammar.push(EOS)
    assert allowed(grammar) == [{EOS}]
    grammar.unwind()
    assert allowed(grammar) == before


@pytest.mark.parametrize(
    ("form", "says"),
    [
        ({"regex": "(a"}, "unclosed group"),
        ({"regex": "(?=a)b"}, "look-ahead"),
        ({"regex": r"[^\s\S]"}, "no token carries the text on"),
        ({"grammar": "start: missing"}, "missing"),
        ({"grammar": 'root ::= "a" [0-9'}, "GBNF"),
        ({"json": {"type": "objekt"}}, "objekt"),
        ({"json": {"not": {"type": "integer"}}}, "Unimplemented keys"),
        ({"json": {"type": "integer", "minimum": 5, "maximum": 3}}, "Unsatisfiable"),
    ],
)
def test_a_form_that_cannot_be_compiled_is_refused_by_name_and_reason(form: dict[str, Any], says: str) -> None:
    (kind,) = form
    with pytest.raises(ValueError, match=rf"^structured_outputs\.{kind} must .*{says}") as caught:
        COMPILER.compile(StructuredOutputsParams(**form))
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("tokenizer", "eos_token_ids", "vocab_size", "says"),
    [
        (None, (EOS,), VOCAB_SIZE, "needs a model with a tokenizer"),
        (TOKENIZER, (), VOCAB_SIZE, "needs a model with a end-of-text token"),
        (TOKENIZER, (EOS,), 100, "vocab size too small"),
    ],
)
def test_a_model_that_cannot_be_constrained_says_why(
    tokenizer: Any, eos_token_ids: tuple[int, ...], vocab_size: int, says: str
) -> None:
    compiler = GrammarCompiler(tokenizer, vocab_size=vocab_size, eos_token_ids=eos_token_ids)
    with pytest.raises(ValueError, match=says):
        compiler.compile(FORMS[2])


def test_gbnf_is_taken_as_lark_is() -> None:
    gbnf = COMPILER.compile(StructuredOutputsParams(grammar='root ::= "a" [0-9]'))
    lark = COMPILER.compile(StructuredOutputsParams(grammar='start: "a" /[0-9]/'))
    assert allowed(gbnf) == allowed(lark)


# ---- the bitmask on the device


@settings(max_examples=50)
@given(vocab_size=st.integers(min_value=1, max_value=100), seed=st.integers(min_value=0, max_value=2**32))
def test_a_bitmask_keeps_the_tokens_whose_bits_are_set(vocab_size: int, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    num_words = -(-vocab_size // 32)
    bitmask = torch.randint(-(2**31), 2**31, (3, num_words), generator=generator, dtype=torch.int64).to(torch.int32)
    bitmask[:, 0] |= 1
    logits = torch.randn(3, vocab_size, generator=generator)
    kept = apply_token_bitmask(logits, bitmask, fallback=torch.full_like(logits, 7.0))
    for row in range(3):
        for token in range(vocab_size):
            is_set = (int(bitmask[row, token // 32]) & 0xFFFFFFFF) >> token % 32 & 1
            assert kept[row, token] == (logits[row, token] if is_set else float("-inf"))


def test_where_other_masks_leave_nothing_the_grammar_alone_holds() -> None:
    """min_tokens forbids the end of the text, and a grammar whose text is complete allows nothing else."""
    request = Request(
        request_id="0",
        prompt_token_ids=[1],
        seed=0,
        sampling_params=SamplingParams(temperature=0.7, min_tokens=5, top_k=3),
    )
    words = torch.tensor([[1, 0], [0b1101, 0]], dtype=torch.int32)  # {0}, {0, 2, 3}
    rows = SamplingRows.build(
        [request], [0, 0], [0, 1], torch.tensor([[9]]), vocab_size=40, eos_token_ids=(0,), device="cpu",
        bitmask=BitmaskRows(row_idx=None, words=words),
    )  # fmt: skip
    probs = process_logits(torch.randn(2, 40), rows).softmax(dim=-1)
    assert not probs.isnan().any()
    assert [set(row.nonzero()[:, 0].tolist()) for row in probs] == [{0}, {2, 3}]


def test_a_distribution_that_has_nothing_of_what_is_allowed_becomes_none_at_all() -> None:
    probs = torch.tensor([[0.5, 0.25, 0.25], [1.0, 0.0, 0.0]])
    conditioned = condition_on_bitmask(probs, torch.tensor([[0b110], [0b110]], dtype=torch.int32))
    assert conditioned.tolist() == [[0.0, 0.5, 0.5], [0.0, 0.0, 0.0]]


def test_a_distribution_under_a_grammar_has_its_bits_in_any_batch() -> None:
    """Bug told here: torch adds a lone row of a large vocabulary up in another order, where it has threads to share."""
    generator, before = torch.Generator().manual_seed(0), torch.get_num_threads()
    probs = torch.randn(12, 128_256, generator=generator).softmax(dim=-1)
    words = torch.randint(-(2**31), 2**31, (12, 128_256 // 32), generator=generator).to(torch.int32)
    torch.set_num_threads(2)
    try:
        together = condition_on_bitmask(probs, words)
        alone = torch.cat([condition_on_bitmask(probs[row : row + 1], words[row : row + 1]) for row in range(12)])
    finally:
        torch.set_num_threads(before)
    assert torch.equal(alone, together)


# ---- drafts


def constrain(
    asked: list[tuple[StructuredOutputsParams | None, str, list[str | int]]], max_draft_tokens: int
) -> tuple[list[list[int]], list[tuple[int, set[int]]]]:
    """(form, text so far, drafted pieces) a request -> drafts that are left, and (row, allowed tokens) of the mask."""
    store = GrammarStore(COMPILER)
    items, guesses = [], []
    for index, (form, text, pieces) in enumerate(asked):
        params = SamplingParams(temperature=0.0, max_tokens=99, structured_outputs=form)
        request = Request(request_id=str(index), prompt_token_ids=[1], seed=0, sampling_params=params)
        assert store.open(request) is None
        token_ids = TOKENIZER.encode(text)
        gain = CommittedTokens(
            request=request, token_ids=token_ids, num_draft_tokens=0, draft_depth=0, num_accepted_tokens=0
        )
        assert store.commit([gain]) == {}
        items.append(scheduled(request, max_draft_tokens))
        guesses.append([piece if isinstance(piece, int) else token(piece) for piece in pieces])
    late = Request(
        request_id="late", prompt_token_ids=[1], seed=0, sampling_params=SamplingParams(structured_outputs=FORMS[1])
    )
    assert store.open(late) is None
    items.append(scheduled(late, 0, is_decoding=False))  # its prompt ends in this step
    drafts, bitmask = store.constrain(Schedule(scheduled=items), draft_tokens_from_lists(guesses, torch.device("cpu")))
    cu = drafts.cu_num_draft_tokens
    assert bitmask is not None and len(cu) == len(asked) + 1
    num_rows = cu[-1] + len(items)
    row_idx = list(range(num_rows)) if bitmask.row_idx is None else bitmask.row_idx.tolist()
    tokens = [set(row.nonzero()[:, 0].tolist()) for row in unpack_bitmask(bitmask.words, vocab_size=VOCAB_SIZE)]
    assert row_idx[-1] == num_rows - 1 and tokens[-1] == {token("{")}
    ids = drafts.token_ids.tolist()
    return [ids[a:b] for a, b in pairwise(cu)], list(zip(row_idx, tokens, strict=True))


def token(text: str) -> int:
    (token_id,) = TOKENIZER.encode(text)
    return token_id


DIGITS = StructuredOutputsParams(regex="[0-9]+(a|b)")


def test_a_draft_is_cut_before_the_first_token_the_grammar_forbids() -> None:
    (first, free, second), rows = constrain(
        [(DIGITS, "1", ["2", "a", "x"]), (None, "1", ["x", "y"]), (DIGITS, "1", ["x", "2"])], max_draft_tokens=2
    )
    assert first == [token("2"), token("a")] and free == [token("x"), token("y")] and second == []
    # Rows 0-2 are the first request's, 3-5 the free one's, 6 the second one's, 7 belongs to the prompt.
    assert [row for row, _ in rows] == [0, 1, 2, 6, 7]
    assert token("a") in rows[1][1] and rows[2][1] == {EOS} and token("x") not in rows[3][1]


def test_a_draft_goes_on_where_one_token_is_allowed_and_ends_with_the_text() -> None:
    form = StructuredOutputsParams(choice=["alpha beta", "gamma"])
    (forced, limited), rows = constrain([(form, "g", []), (form, "g", [])], max_draft_tokens=9)
    assert TOKENIZER.decode(forced, skip_special_tokens=True) == "amma" and forced[-1] == EOS
    assert forced == limited
    assert all(len(tokens) == 1 for _, tokens in rows)
    ((cut,), _) = constrain([(form, "g", [])], max_draft_tokens=1)
    assert cut == forced[:1]


def test_nothing_is_drafted_behind_the_end_of_the_text_nor_at_a_place_without_a_guess() -> None:
    digits = StructuredOutputsParams(regex="[0-9]+")
    (ended, hole), rows = constrain([(digits, "1", ["2", EOS, EOS, "3"]), (digits, "1", ["2", -1, "3"])], 4)
    assert ended == [token("2"), EOS] and hole == [token("2")]
    assert rows[2] == (2, {EOS})


def test_a_drafter_walks_every_grammar_by_its_own_tokens_and_leaves_it_where_it_was() -> None:
    """Rows are those of the active requests, in their order; a free one has none."""
    store = GrammarStore(COMPILER)
    forms = (StructuredOutputsParams(choice=["ab", "cd"]), None, DIGITS)
    for index, form in enumerate(forms):
        params = SamplingParams(structured_outputs=form)
        request = Request(request_id=str(index), prompt_token_ids=[1], seed=0, sampling_params=params)
        assert store.open(request) is None

    def seen(bitmask: BitmaskRows | None) -> list[tuple[int, set[int]]]:
        assert bitmask is not None
        tokens = [set(row.nonzero()[:, 0].tolist()) for row in unpack_bitmask(bitmask.words, vocab_size=VOCAB_SIZE)]
        rows = range(len(tokens)) if bitmask.row_idx is None else bitmask.row_idx.tolist()
        return list(zip(rows, tokens, strict=True))

    letters = allowed(COMPILER.compile(forms[0]))[0]  # type: ignore[arg-type]
    digits = allowed(COMPILER.compile(DIGITS))[0]
    assert letters & digits == set()
    for _ in range(2):  # the second walk finds them as the first did, though nobody said that the first was over
        walk = store.walk(["0", "1", "2"])
        assert seen(walk.bitmask([0, 1, 2])) == [(0, letters), (2, digits)]
        walk.advance([0, 1, 2], torch.tensor([token("a"), 7, token("1")]))
        ((first, after_digit), (second, after_letter)) = seen(walk.bitmask([2, 0]))
        assert (first, second) == (0, 1) and token("a") in after_digit and after_letter == {token("b")}
        assert walk.bitmask([1]) is None
        walk.advance([2], torch.tensor([token("a")]))
        assert seen(walk.bitmask([1, 2])) == [(1, {EOS})]


def test_distributions_and_sources_stay_with_their_drafts() -> None:
    """The first draft is cut and carried on, the free one keeps its probs, tokens for sure have probs of 1."""
    store = GrammarStore(COMPILER)
    forms = (StructuredOutputsParams(choice=["alpha beta", "gamma"]), None)
    requests = [
        Request(
            request_id=str(index),
            prompt_token_ids=[1],
            seed=0,
            sampling_params=SamplingParams(max_tokens=9, structured_outputs=form),
        )
        for index, form in enumerate(forms)
    ]
    assert [store.open(request) for request in requests] == [None, None]
    drafts, bitmask = store.constrain(
        schedule_of(*requests, max_draft_tokens=3),
        DraftTokens(
            token_ids=torch.tensor([token("g"), token("x"), 7]),
            cu_num_draft_tokens=[0, 2, 3],
            probs=torch.full((3, VOCAB_SIZE), 1 / VOCAB_SIZE),
            sources=("a", "b", "c"),
        ),
    )
    assert drafts.cu_num_draft_tokens == [0, 3, 4] and drafts.sources == ("a", "grammar", "grammar", "c")
    assert drafts.probs is not None and bitmask is not None
    assert allowed(COMPILER.compile(forms[0])) == [set(drafts.probs[0].nonzero()[:, 0].tolist())]  # type: ignore[arg-type]
    assert drafts.probs.sum(dim=1).tolist() == pytest.approx([1.0] * 4)
    for place in (1, 2):
        assert drafts.probs[place].nonzero()[:, 0].tolist() == [int(drafts.token_ids[place])]
    assert (drafts.probs[3] == 1 / VOCAB_SIZE).all() and int(drafts.token_ids[3]) == 7


def test_a_step_without_grammars_passes_untouched() -> None:
    request = Request(request_id="0", prompt_token_ids=[1], seed=0, sampling_params=SamplingParams())
    drafts = draft_tokens_from_lists([[5, 6]], torch.device("cpu"))
    kept, bitmask = GrammarStore(COMPILER).constrain(schedule_of(request, max_draft_tokens=2), drafts)
    assert kept is drafts and bitmask is None


@pytest.mark.parametrize("rule", ["probabilistic", "block"])
def test_a_draft_from_a_distribution_that_knows_no_grammar_leaves_the_targets_distribution(rule: str) -> None:
    """A cut draft is none, so the distribution of those left is conditioned on the grammar.

    Kept as it was, the residual would be taken against mass that no draft has: measured here with the conditioning
    taken out, the p-value of the first token is below 1e-30.
    """
    num_requests, form = 6000, StructuredOutputsParams(regex="[a-f][a-c]")
    store = GrammarStore(COMPILER)
    letters = [token(letter) for letter in "abcdefghijkl"]
    target, draft = torch.full((VOCAB_SIZE,), -30.0), torch.full((VOCAB_SIZE,), float("-inf"))
    target[letters] = torch.tensor([0.1, 1.0, -1.0, 0.5, 0.3, 0.9, 2.0, 1.0, 1.0, 0.0, 0.0, 0.0])
    draft[letters] = torch.tensor([1.5, 0.0, 0.0, 1.0, -2.0, 0.0, 1.0, 1.5, 0.3, 0.0, 0.0, 1.0])
    requests = [
        Request(
            request_id=str(index),
            prompt_token_ids=[1],
            seed=index,
            sampling_params=SamplingParams(max_tokens=9, structured_outputs=form),
        )
        for index in range(num_requests)
    ]
    assert all(store.open(request) is None for request in requests)
    every = list(range(num_requests))
    plain = SamplingRows.build(
        requests, every, [0] * num_requests, None, vocab_size=VOCAB_SIZE, eos_token_ids=(EOS,), device="cpu"
    )
    ids, probs = draft_tokens(draft.expand(num_requests, -1), plain, "probabilistic", need_probs=True)
    drafts, bitmask = store.constrain(
        schedule_of(*requests, max_draft_tokens=1),
        DraftTokens(token_ids=ids, cu_num_draft_tokens=[0, *(i + 1 for i in every)], probs=probs),
    )
    counts = drafts.num_draft_tokens
    assert 0.3 * num_requests < sum(counts) < 0.7 * num_requests
    rows = SamplingRows.build(
        requests,
        [index for index, count in enumerate(counts) for _ in range(count + 1)],
        [depth for count in counts for depth in range(count + 1)],
        None,
        vocab_size=VOCAB_SIZE,
        eos_token_ids=(EOS,),
        device="cpu",
        bitmask=bitmask,
    )
    output = RejectionSampler(rejection_sample_method=rule)(target.expand(rows.num_rows, -1), drafts, rows)
    assert_follows(output.token_ids[:, 0], probs_of(target, letters[:6]), "first token")
    second = output.token_ids[output.num_accepted_tokens == 1, 1]
    assert_follows(second, probs_of(target, letters[:3]), "second token")


def probs_of(logits: Tensor, token_ids: list[int]) -> Tensor:
    probs = torch.zeros(VOCAB_SIZE)
    probs[token_ids] = logits[token_ids].softmax(dim=-1)
    return probs
