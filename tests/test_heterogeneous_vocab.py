"""A draft of another tokenizer changes no token and no distribution; it says what the two vocabularies share."""

from __future__ import annotations

import json
import logging
import random
import shutil
import warnings
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from proposers.vocabularies.intersection import Intersection, intersect
from proposers.vocabularies.spelling import Spelling, read_spelling
from proposers.vocabularies.translation import Translation
from runner.engine.errors import UserError
from runner.engine.sampling_params import SamplingParams
from runner.engine.structured_outputs import StructuredOutputsParams
from runner.llm import LLM
from runner.tiny import DRAFT_DIR
from tests.conftest import complete
from tests.no_readback import NoReadback
from tests.test_every_cell import ALPHA, NUM_REQUESTS, NUM_TOKENS, PROMPT, exact_distribution, p_value, sampling_params
from tests.test_losslessness import PARAMS, PROMPTS, ROOMY, SCHEDULES, answers, counts
from tests.transformers_reference import random_model

CPU = torch.device("cpu")
DRAFTING = ("greedy", "probabilistic", "coupled")


# What tokens stand for.


def byte_level(tokens: Sequence[str], special: Sequence[str] = (), **roles: str) -> Any:
    """A tokenizer as GPT-2's, whose special tokens come behind the others."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    backend = Tokenizer(models.BPE({token: i for i, token in enumerate(tokens)}, []))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    return fast(backend, special, roles)


def sentencepiece(tokens: Sequence[str], special: Sequence[str] = (), **roles: str) -> Any:
    """A tokenizer as Llama 2's."""
    from tokenizers import Tokenizer, decoders, models

    backend = Tokenizer(models.BPE({token: i for i, token in enumerate(tokens)}, [], byte_fallback=True))
    backend.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    return fast(backend, special, roles)


def word_level(words: Sequence[str], **roles: str) -> Any:
    from tokenizers import Tokenizer, models, pre_tokenizers

    backend = Tokenizer(models.WordLevel({word: i for i, word in enumerate(words)}, words[0]))
    backend.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return fast(backend, (), roles)


def fast(backend: Any, special: Sequence[str], roles: dict[str, str]) -> Any:
    from tokenizers import AddedToken
    from transformers import PreTrainedTokenizerFast

    backend.add_special_tokens([AddedToken(token, special=True) for token in special])
    return PreTrainedTokenizerFast(
        tokenizer_object=backend, **{f"{role}_token": token for role, token in roles.items()}
    )


def compare(target: Any, draft: Any) -> Intersection:
    return intersect(
        read_spelling(target, "the target"),
        read_spelling(draft, "the draft"),
        target_vocab_size=len(target),
        draft_vocab_size=len(draft),
    )


def test_a_space_a_newline_and_a_letter_are_the_same_in_either_spelling() -> None:
    ours = byte_level(["a", "Ġa", "Ċ", "ĠĠ", "Ã©", "q"])
    theirs = sentencepiece(["<0x0A>", "é", "▁▁", "▁a", "a", "Ġa"])
    assert compare(ours, theirs).pairs == {0: 4, 1: 3, 2: 0, 3: 2, 4: 1}
    assert compare(theirs, ours).pairs == {0: 2, 1: 4, 2: 3, 3: 1, 4: 0}


def test_bytes_that_are_no_text_by_themselves_are_tokens_as_well() -> None:
    assert compare(byte_level(["Ã", "©"]), sentencepiece(["<0xA9>", "<0xC3>"])).pairs == {0: 1, 1: 0}


def test_a_piece_comes_before_the_byte_token_that_prints_the_same() -> None:
    """In Llama 2 <0x41> has a lower id than A, and is never said."""
    with_bytes = sentencepiece(["<0x41>", "b", "A"])
    assert compare(byte_level(["b", "A"]), with_bytes).pairs == {0: 1, 1: 2}
    found = compare(with_bytes, byte_level(["b", "A"]))
    assert found.pairs == {1: 0, 2: 1}
    assert found.reading == [1, 0, 1], "both are read as the A there is"
    assert compare(with_bytes, with_bytes).pairs == {0: 0, 1: 1, 2: 2}


def test_special_tokens_go_by_name_then_by_role_and_never_by_what_they_would_print() -> None:
    ours = byte_level(["a", "<s>"], ["<|im_end|>", "<|start|>", "<|end|>"], bos="<|start|>", eos="<|end|>")
    theirs = sentencepiece(["</s>", "a"], ["<s>", "<|im_end|>", "<stop>"], bos="<s>", eos="<stop>")
    assert compare(ours, theirs).pairs == {0: 1, 2: 3, 3: 2, 4: 4}
    # A name that both have goes before a role; the token left over is read as the one of its role.
    other = byte_level(["a"], ["<|im_end|>", "<|end|>"], eos="<|im_end|>")
    found = compare(ours, other)
    assert found.pairs == {0: 0, 2: 1, 4: 2}
    assert found.reading == [0, 1, 1, 1, 2]


def test_a_token_of_several_roles_ends_the_text_before_it_begins_one() -> None:
    """GPT-2 has one special token for everything, and the draft must be able to say that the text is over."""
    ours = byte_level(["a"], ["<|endoftext|>"], bos="<|endoftext|>", eos="<|endoftext|>", unk="<|endoftext|>")
    theirs = sentencepiece(["a"], ["<unk>", "<s>", "</s>"], unk="<unk>", bos="<s>", eos="</s>")
    assert compare(ours, theirs).pairs == {0: 0, 1: 3}
    assert compare(theirs, ours).pairs == {0: 0, 3: 1}
    assert compare(theirs, ours).reading == [0, 1, 1, 1]


@pytest.mark.parametrize(
    ("family", "spelled"),
    [
        ("Qwen2Tokenizer", {"Ġa": b" a", "Ċ": b"\n"}),
        ("GPTNeoXTokenizer", {"Ġa": b" a", "Ċ": b"\n"}),
        ("LlamaTokenizer", {"▁a": b" a", "<0x0A>": b"\n"}),
        ("GemmaTokenizer", {"▁a": b" a", "<0x0A>": b"\n"}),
    ],
)
def test_the_rules_of_transformers_own_tokenizers_are_read(family: str, spelled: dict[str, bytes]) -> None:
    import transformers

    special = {token: i for i, token in enumerate(["<unk>", "<s>", "</s>", "<pad>", "<bos>", "<eos>"])}
    vocab = special | {token: len(special) + i for i, token in enumerate(spelled)}
    tokenizer = getattr(transformers, family)(vocab=vocab, merges=[])
    spelling = read_spelling(tokenizer, "it")
    assert {token: spelling.texts[vocab[token]] for token in spelled} == spelled
    assert spelling.byte_token_ids == {i for token, i in vocab.items() if token.startswith("<0x")}
    assert tokenizer.eos_token_id == spelling.roles["eos"] and tokenizer.eos_token_id not in spelling.texts


def test_a_token_put_beside_the_trained_ones_prints_its_name() -> None:
    from tokenizers import AddedToken

    ours, theirs = byte_level(["a", "b"]), byte_level(["b", "a", "ĠĠ"])
    ours.add_tokens([AddedToken("  "), AddedToken("<think>")])
    theirs.add_tokens([AddedToken("<think>", special=True)])
    assert compare(ours, theirs).pairs == {0: 1, 1: 0, 2: 2, 3: 3}, "special in one tokenizer, ordinary in the other"


def test_a_token_that_the_draft_lacks_is_read_as_the_longest_end_of_it_that_it_has() -> None:
    ours = byte_level(["Ġwalking", "king", "xyz", "g"])
    theirs = byte_level(["Ġwalk", "g", "ing"], ["<unk>"], unk="<unk>")
    assert compare(ours, theirs).reading == [2, 2, 3, 1]
    assert compare(ours, theirs).pairs == {3: 1}


@pytest.mark.parametrize(("roles", "expected"), [(("unk", "bos", "eos"), "unk"), (("bos", "eos"), "bos"), ((), None)])
def test_what_prints_nothing_the_draft_knows_is_read_as_unknown(roles: tuple[str, ...], expected: str | None) -> None:
    named = {role: f"<{role}>" for role in roles}
    theirs = byte_level(["a", "b"], list(named.values()), **named)
    read = compare(byte_level(["a", "q"]), theirs).reading[1]
    assert read == (0 if expected is None else theirs.convert_tokens_to_ids(f"<{expected}>"))


def test_tokens_without_a_logit_are_not_shared() -> None:
    spelling = read_spelling(byte_level(["a", "b", "c", "d"], ["<e>"], eos="<e>"), "it")
    found = intersect(spelling, spelling, target_vocab_size=8, draft_vocab_size=3)
    assert found.pairs == {0: 0, 1: 1, 2: 2}
    assert found.reading == [0, 1, 2, 0, 0, 0, 0, 0]
    assert intersect(spelling, spelling, target_vocab_size=2, draft_vocab_size=5).pairs == {0: 0, 1: 1}


texts = st.text("ab ", min_size=1, max_size=3).map(str.encode)


@st.composite
def spellings(draw: st.DrawFn) -> tuple[Spelling, int]:
    """A vocabulary with tokens that print the same, and the size of a head that may be smaller or larger."""
    printed = dict(enumerate(draw(st.lists(texts, max_size=12))))
    names = draw(st.lists(st.sampled_from(["<x>", "<y>", "<z>"]), unique=True))
    special = dict(enumerate(names, start=len(printed)))
    named = draw(st.sets(st.sampled_from(["bos", "eos", "unk"]))) if special else set()
    roles = {role: draw(st.sampled_from(list(special))) for role in sorted(named)}
    byte_tokens = draw(st.sets(st.sampled_from(range(12)))) & printed.keys()
    numbering = {f"{token_id}": token_id for token_id in (*printed, *special)}
    spelling = Spelling(
        numbering=numbering, texts=printed, names=special, byte_token_ids=frozenset(byte_tokens), roles=roles
    )
    return spelling, max(1, len(numbering) + draw(st.integers(-3, 3)))


@given(spellings(), spellings())
def test_partners_print_the_same_or_are_special_and_nobody_has_two(
    ours: tuple[Spelling, int], theirs: tuple[Spelling, int]
) -> None:
    (target, target_size), (draft, draft_size) = ours, theirs
    found = intersect(target, draft, target_vocab_size=target_size, draft_vocab_size=draft_size)
    assert len(set(found.pairs.values())) == len(found.pairs) and list(found.pairs) == sorted(found.pairs)
    assert len(found.reading) == target_size and all(0 <= token_id < draft_size for token_id in found.reading)
    num_texts = 0
    for target_id, draft_id in found.pairs.items():
        assert target_id < target_size and draft_id < draft_size and found.reading[target_id] == draft_id
        assert (target_id in target.texts) == (draft_id in draft.texts)
        if target_id in target.texts:
            assert target.texts[target_id] == draft.texts[draft_id]
            num_texts += 1
    assert found.num_texts == num_texts
    ours_seen = [text for token_id, text in target.texts.items() if token_id < target_size]
    theirs_seen = [text for token_id, text in draft.texts.items() if token_id < draft_size]
    assert num_texts == sum(min(ours_seen.count(text), theirs_seen.count(text)) for text in set(ours_seen)), "no fewer"
    back = intersect(draft, target, target_vocab_size=draft_size, draft_vocab_size=target_size)
    assert {(a, b) for b, a in back.pairs.items() if b in draft.texts} == {
        (a, b) for a, b in found.pairs.items() if a in target.texts
    }


@given(st.lists(texts, unique=True, min_size=1), st.randoms())
def test_a_renumbered_vocabulary_is_shared_whole(words: list[bytes], shuffler: random.Random) -> None:
    order = list(range(len(words)))
    shuffler.shuffle(order)
    ours = Spelling(numbering={}, texts=dict(enumerate(words)))
    theirs = Spelling(numbering={}, texts={order[i]: word for i, word in enumerate(words)})
    found = intersect(ours, theirs, target_vocab_size=len(words), draft_vocab_size=len(words))
    assert found.reading == order and found.pairs == dict(enumerate(order))


@given(spellings(), spellings(), st.integers(0, 2**32))
def test_the_drafts_distribution_is_its_own_given_that_the_token_is_shared(
    ours: tuple[Spelling, int], theirs: tuple[Spelling, int], seed: int
) -> None:
    (target, target_size), (draft, draft_size) = ours, theirs
    found = intersect(target, draft, target_vocab_size=target_size, draft_vocab_size=draft_size)
    if not found.pairs:
        return
    logits = torch.randn(3, draft_size, generator=torch.Generator().manual_seed(seed))
    probs = Translation(found, CPU).to_target(logits).double().softmax(-1)
    own = logits.double().softmax(-1)
    shared = list(found.pairs.values())
    expected = torch.zeros(3, target_size, dtype=torch.float64)
    expected[:, list(found.pairs)] = own[:, shared] / own[:, shared].sum(-1, keepdim=True)
    torch.testing.assert_close(probs, expected, rtol=1e-12, atol=0)
    assert torch.equal(probs == 0, expected == 0)


def test_a_row_that_forbids_every_shared_token_has_a_distribution_still() -> None:
    translation = Translation(Intersection(pairs={2: 0, 3: 1}, reading=[0, 0, 0, 1], num_texts=2), CPU)
    with NoReadback():
        logits = translation.to_target(torch.tensor([[1.0, 2.0]]))
    assert logits.softmax(-1)[0, :2].tolist() == [0, 0]
    logits[:, 2:] = float("-inf")
    assert logits.softmax(-1).tolist() == [[0.5, 0.5, 0, 0]]


# Through the engine.

SHAPE: dict[str, Any] = {
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "max_position_embeddings": 256,
    "tie_word_embeddings": False,
}


class Family:
    """Checkpoints of one target and of drafts made of its first layer, under vocabularies of their own."""

    def __init__(self, directory: Path, words: Sequence[str], model_type: str = "llama") -> None:
        from transformers import AutoConfig

        self.directory, self.words, self.model_type = directory, list(words), model_type
        config = AutoConfig.for_model(model_type, vocab_size=len(words), num_hidden_layers=2, eos_token_id=2, **SHAPE)
        model = random_model(config)
        for name, parameter in model.named_parameters():
            if "layers.1." in name and "norm" not in name:
                parameter.data.mul_(0.3)  # so that the first layer alone is a fair guess
        self.state = model.state_dict()
        self.target = self._save("target", model, self.words)

    def draft(self, name: str, words: Sequence[str], *, num_layers: int = 1, num_rows: int | None = None) -> Path:
        """The target's rows for words that it has, others' at random; num_rows: of a padded head."""
        from transformers import AutoConfig, AutoModelForCausalLM

        shape = {**SHAPE, "vocab_size": num_rows or len(words), "num_hidden_layers": num_layers}
        config = AutoConfig.for_model(self.model_type, **shape)
        model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
        generator = torch.Generator().manual_seed(3)
        state = model.state_dict()
        for key, tensor in state.items():
            if tensor.shape == self.state[key].shape and "embed" not in key and "lm_head" not in key:
                tensor.copy_(self.state[key])
                continue
            tensor.normal_(generator=generator).mul_(0.2)
            for row, word in enumerate(words):
                if word in self.words:
                    tensor[row] = self.state[key][self.words.index(word)]
        return self._save(name, model, words)

    def _save(self, name: str, model: Any, words: Sequence[str]) -> Path:
        path = self.directory / name
        model.save_pretrained(path)
        word_level(words).save_pretrained(path)
        return path

    def engine(
        self, draft: Path | None, num_tokens: int = 3, engine_args: dict[str, Any] | None = None, **keys: Any
    ) -> LLM:
        config = None
        if draft is not None:
            config = {"method": "draft_model", "model": str(draft), "num_speculative_tokens": num_tokens}
            config |= {"use_heterogeneous_vocab": True, **keys}
        with warnings.catch_warnings():  # of lossy rules
            warnings.simplefilter("ignore", UserWarning)
            return LLM(str(self.target), speculative_config=config, device="cpu", **(engine_args or {}))


def shuffled(words: Sequence[str]) -> list[str]:
    return random.Random(0).sample(words, len(words))


WORDS = [f"w{i}" for i in range(64)]
OTHER_WORDS = shuffled([*WORDS[:48], *(f"other{i}" for i in range(23))])


@pytest.fixture(scope="module")
def family(tmp_path_factory: pytest.TempPathFactory) -> Family:
    made = Family(tmp_path_factory.mktemp("family"), WORDS)
    made.draft("other", OTHER_WORDS)
    return made


@pytest.fixture(scope="module")
def plain(family: Family) -> list[tuple[Any, ...]]:
    return answers(complete(family.engine(None, engine_args=ROOMY), PROMPTS, PARAMS)[0])


@pytest.mark.parametrize("drafting", DRAFTING)
def test_a_draft_of_another_vocabulary_changes_no_token(
    family: Family, plain: list[tuple[Any, ...]], drafting: str
) -> None:
    llm = family.engine(
        family.directory / "other", rejection_sample_method="strict", draft_sample_method=drafting, engine_args=ROOMY
    )
    requests, metrics = complete(llm, PROMPTS, PARAMS)
    assert answers(requests) == plain
    drafted, accepted = counts(metrics)
    assert 0.05 * drafted < accepted < drafted


@pytest.mark.parametrize("schedule", ["chunks down to one token", "few blocks"])
def test_nor_does_it_under_chunks_and_preemption(family: Family, plain: list[tuple[Any, ...]], schedule: str) -> None:
    llm = family.engine(family.directory / "other", engine_args=SCHEDULES[schedule])
    assert answers(complete(llm, PROMPTS, PARAMS)[0]) == plain


@pytest.mark.parametrize("model_type", ["llama", "granite"])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_the_target_itself_under_other_numbers_is_always_right(
    tmp_path: Path, model_type: str, temperature: float
) -> None:
    """At temperature 1 its drafts are coupled: drawn with noise that is keyed by the target's ids."""
    twins = Family(tmp_path, WORDS, model_type)
    llm = twins.engine(twins.draft("twin", shuffled(WORDS), num_layers=2))
    params = SamplingParams(temperature=temperature, max_tokens=40, ignore_eos=True, seed=8)
    _, metrics = complete(llm, PROMPTS[:4], [params] * 4)
    drafted, accepted = counts(metrics)
    assert accepted == drafted > 100


# Of six words the draft has four, and two that the target does not know.
SIX = ["a", "b", "c", "d", "e", "f"]
FOUR = ["x", "d", "b", "y", "a", "f"]


@pytest.fixture(scope="module")
def six(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., LLM]:
    made = Family(tmp_path_factory.mktemp("six"), SIX)
    draft = made.draft("four", FOUR)
    return lambda **keys: made.engine(draft, 2, engine_args={"max_num_seqs": 512}, **keys)


def sample(llm: LLM, params: SamplingParams) -> tuple[float, int, int]:
    """How well the requests' first tokens fit the exact distribution; (drafted, accepted) tokens.

    They are one token longer than what is judged, so that a request's first step has room for two drafts.
    """
    requests, metrics = complete(llm, [PROMPT], [params])
    first = [replace(request, output_token_ids=request.output_token_ids[:NUM_TOKENS]) for request in requests]
    return p_value(first, exact_distribution(llm, params)), *counts(metrics)


@pytest.mark.parametrize(
    ("rule", "drafting", "sampler"),
    [
        *(("probabilistic", drafting, "penalties, bias") for drafting in DRAFTING),
        *(("block", drafting, "penalties, bias") for drafting in ("greedy", "probabilistic")),
        *((rule, "probabilistic", "top-k, top-p, min-p") for rule in ("probabilistic", "block")),
    ],
)
def test_the_distribution_is_kept(six: Callable[..., LLM], rule: str, drafting: str, sampler: str) -> None:
    llm = six(rejection_sample_method=rule, draft_sample_method=drafting)
    value, drafted, accepted = sample(llm, sampling_params(sampler, NUM_REQUESTS // 2, NUM_TOKENS + 1))
    assert 0 < accepted < drafted
    assert value > ALPHA


FROM_THE_FIRST_DRAFT_ON = {"allowed_token_ids": [2, 4]}
AFTER_THE_FIRST_DRAFT = {"bad_words": [f"{a} {b}" for a in "abdf" for b in "abdf"]}


@pytest.mark.parametrize(
    ("rule", "forbidden"),
    [
        ("probabilistic", FROM_THE_FIRST_DRAFT_ON),
        ("probabilistic", AFTER_THE_FIRST_DRAFT),
        ("block", AFTER_THE_FIRST_DRAFT),
    ],
)
def test_the_distribution_is_kept_where_a_request_allows_no_shared_token(
    six: Callable[..., LLM], rule: str, forbidden: dict[str, Any]
) -> None:
    """The draft's distribution would be zeros, and 0 / 0 in the places that read it; block looks ahead into them."""
    llm = six(rejection_sample_method=rule)
    params = SamplingParams(n=NUM_REQUESTS, max_tokens=NUM_TOKENS + 1, ignore_eos=True, seed=5, **forbidden)
    value, drafted, accepted = sample(llm, params)
    assert drafted > accepted > 0
    assert value > ALPHA


@pytest.mark.parametrize("rule", ["typical", "synthetic"])
def test_the_lossy_rules_run_as_they_are(six: Callable[..., LLM], rule: str) -> None:
    keys = {"synthetic_acceptance_rate": 0.5} if rule == "synthetic" else {}
    requests, metrics = complete(six(rejection_sample_method=rule, **keys), [PROMPT], [SamplingParams(max_tokens=20)])
    assert len(requests[0].output_token_ids) > 0 and counts(metrics)[0] > 0


def record_drafts(llm: LLM) -> list[Any]:
    """Everything its proposer guesses, from now on."""
    guesses: list[Any] = []
    propose = llm.engine.proposer.propose

    def recording(schedule: Any) -> Any:
        drafts = propose(schedule)
        guesses.append((drafts.token_ids.tolist(), None if drafts.probs is None else drafts.probs.tolist()))
        return drafts

    llm.engine.proposer.propose = recording  # type: ignore[method-assign]
    return guesses


def test_a_draft_of_the_same_vocabulary_drafts_the_same_with_the_flag_and_without(family: Family) -> None:
    same = family.draft("same", WORDS)
    runs = []
    for flag in (True, False):
        keys = {"use_heterogeneous_vocab": flag, "rejection_sample_method": "probabilistic"}
        llm = family.engine(same, engine_args={"enforce_eager": True}, **keys)  # whole steps tell nobody their drafts
        guesses = record_drafts(llm)
        requests, _ = complete(llm, PROMPTS[:5], PARAMS[:5])
        runs.append((answers(requests), guesses))
    assert runs[0] == runs[1] and len(runs[0][1]) > 5


def test_a_head_with_padding_rows_drafts_what_it_drafts_without_them(family: Family) -> None:
    """Qwen2.5's sizes differ in nothing else."""
    runs = []
    for num_rows in (64, 72):
        llm = family.engine(family.draft(f"rows{num_rows}", WORDS, num_rows=num_rows))
        guesses = record_drafts(llm)
        complete(llm, PROMPTS[:3], [SamplingParams(temperature=0.0, max_tokens=20)] * 3)
        runs.append([token_ids for token_ids, _ in guesses])
    assert runs[0] == runs[1]


# With the tiny family's tokenizer: its draft, cut to the tokens of the first merges.


@pytest.fixture(scope="module")
def short_draft(tmp_path_factory: pytest.TempPathFactory) -> Path:
    from safetensors.torch import load_file, save_file

    path, num_tokens = tmp_path_factory.mktemp("short") / "draft", 700
    shutil.copytree(DRAFT_DIR, path)
    tokenizer = json.loads((path / "tokenizer.json").read_text())
    vocab = {token: i for token, i in tokenizer["model"]["vocab"].items() if i < num_tokens}
    merges = [merge for merge in tokenizer["model"]["merges"] if "".join(merge) in vocab]
    tokenizer["model"] |= {"vocab": vocab, "merges": merges}
    (path / "tokenizer.json").write_text(json.dumps(tokenizer))
    config = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps({**config, "vocab_size": num_tokens}))
    tensors = load_file(path / "model.safetensors")
    cut = {name: t[:num_tokens].clone() if len(t) == config["vocab_size"] else t for name, t in tensors.items()}
    save_file(cut, path / "model.safetensors", metadata={"format": "pt"})
    return path


def tiny(draft: Path | None, **keys: Any) -> LLM:
    config = None
    if draft is not None:
        config = {"method": "draft_model", "num_speculative_tokens": 4, "use_heterogeneous_vocab": True}
        config |= {"model": str(draft), **keys}
    return LLM("tiny", speculative_config=config, device="cpu")


def test_a_grammar_is_followed_whose_tokens_the_draft_may_lack(short_draft: Path) -> None:
    wanted = [
        StructuredOutputsParams(regex=r"[a-z ]{20,40}"),
        StructuredOutputsParams(json='{"type": "object", "properties": {"name": {"type": "string", "maxLength": 9}}, '
                                '"required": ["name"]}'),
        StructuredOutputsParams(choice=["return without the other standard", "continue"]),
    ]  # fmt: skip
    params = [SamplingParams(temperature=t, max_tokens=30, structured_outputs=w) for w in wanted for t in (0.0, 1.0)]
    prompts = ["def read(path):\n", "class A:\n"] * 3
    runs = [complete(tiny(draft), prompts, params) for draft in (None, short_draft)]
    assert answers(runs[0][0]) == answers(runs[1][0])
    drafted, accepted = counts(runs[1][1])
    assert 0 < accepted < drafted


def test_the_log_says_how_much_is_shared(short_draft: Path, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, logger="proposers.vocabularies.translation"):
        tiny(short_draft)
        tiny(DRAFT_DIR)
    assert [record.message for record in caplog.records] == [
        f"{short_draft}: shares 700 tokens with the target, 34.2 % of its 2048; the draft has 700",
        f"{DRAFT_DIR}: numbers its tokens as the target does, use_heterogeneous_vocab changes nothing",
    ]


# What is refused.


def refusal(make: Callable[[], object]) -> str:
    with pytest.raises(UserError) as caught:
        make()
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_vocabularies_without_a_common_word_are_refused(family: Family) -> None:
    stranger = family.draft("stranger", ["w0", *(f"s{i}" for i in range(40))])
    message = refusal(lambda: family.engine(stranger))
    assert message == (
        f"speculative_config.model={stranger} must share at least 2 tokens with the target for "
        "use_heterogeneous_vocab, beside special ones, got 1; choose another draft"
    )


def test_without_the_flag_the_refusal_names_it(family: Family) -> None:
    for draft in (family.directory / "other", family.draft("renumbered", shuffled(WORDS))):
        message = refusal(lambda draft=draft: family.engine(draft, use_heterogeneous_vocab=False))
        assert message.endswith("or set speculative_config.use_heterogeneous_vocab=True")


def test_models_without_a_tokenizer_cannot_be_compared(family: Family) -> None:
    hf_config = {"model_type": "llama", "vocab_size": 64, "num_hidden_layers": 1, **SHAPE}
    dummy = {"load_format": "dummy", "hf_config": hf_config, "device": "cpu"}
    config = {"method": "draft_model", "num_speculative_tokens": 4, "use_heterogeneous_vocab": True}
    draft = {"model": "d", "hf_config": hf_config}
    message = refusal(lambda: LLM("dummy", speculative_config=config, draft=draft, **dummy))
    assert message.startswith("speculative_config.use_heterogeneous_vocab=True compares tokens by what they print and ")
    assert "got no tokenizer for the target; name models that have one, or remove use_heterogeneous_vocab" in message
    message = refusal(
        lambda: LLM("dummy", speculative_config=config, draft=draft, tokenizer=str(family.target), **dummy)
    )
    assert "got no tokenizer for the draft d;" in message


def test_a_draft_directory_without_a_tokenizer_is_named(family: Family, tmp_path: Path) -> None:
    bare = tmp_path / "bare"
    shutil.copytree(family.directory / "other", bare, ignore=shutil.ignore_patterns("tokenizer*"))
    message = refusal(lambda: family.engine(bare))
    assert message.startswith("speculative_config.model: no tokenizer can be read from ")
    assert "set speculative_config.model=" in message
