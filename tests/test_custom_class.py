"""A user's own proposer, a class or a file of proposers/, takes part like any other; each mistake is one clear error.

Drafts of a wrong shape would otherwise shift the rows of the neighbours, or end in an index error deep in a kernel.
"""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar

import pytest
import torch

import proposers
from proposers.base import Proposer, ProposerContext, draft_tokens_from_lists
from runner.cli.compose import Composer
from runner.config import method_union
from runner.engine.errors import UserError
from runner.engine.request import DraftTokens, VerifyOutput
from runner.engine.schedule import Schedule
from runner.llm import LLM, SamplingParams
from runner.proposer import build_proposer
from tests.conftest import TARGET_CONFIG, Engines, complete

PROMPTS = [{"prompt_token_ids": [3 + i, 4, 5]} for i in range(2)]
PARAMS = SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True)
VOCAB_SIZE = TARGET_CONFIG["vocab_size"]
CPU = torch.device("cpu")


def custom(class_name: str, num_speculative_tokens: int = 3, **options: Any) -> dict[str, Any]:
    return {
        "method": "custom_class",
        "model": f"tests.test_custom_class.{class_name}",
        "num_speculative_tokens": num_speculative_tokens,
        "options": options,
    }


def of_lists(*guesses: list[int]) -> DraftTokens:
    return draft_tokens_from_lists(list(guesses), CPU)


GOOD = of_lists([1, 2], [3])


class MistakenProposer(Proposer):
    """Gives what the test says, whenever the two requests decode."""

    given: ClassVar[Any] = None

    def propose(self, schedule: Schedule) -> DraftTokens:
        return self.given if schedule.decoding else of_lists()


class RecordingProposer(Proposer):
    """Drafts zeros, and remembers what it was told."""

    cache_bytes_per_block = 10

    def __init__(self, *, num_speculative_tokens: int, context: ProposerContext, tag: Any = None) -> None:
        super().__init__(num_speculative_tokens=num_speculative_tokens, context=context)
        self.events: list[str] = []
        self.tag = tag

    def propose(self, schedule: Schedule) -> DraftTokens:
        self.events.append("propose")
        return draft_tokens_from_lists([[0] * item.max_draft_tokens for item in schedule.decoding], self.context.device)

    def update(self, schedule: Schedule, output: VerifyOutput) -> None:
        assert len(output.num_accepted_tokens) == len(schedule.scheduled)
        self.events.append("update")

    def release(self, request_id: str) -> None:
        self.events.append(f"release {request_id}")

    def allocate_cache(self, num_blocks: int) -> None:
        self.events.append(f"allocate {num_blocks}")


class SaysNothing(Proposer):
    """Forgets to define propose."""


class TakesOther(Proposer):
    def __init__(self, num_tokens: int) -> None:
        super().__init__(num_speculative_tokens=num_tokens, context=None)  # type: ignore[arg-type]

    def propose(self, schedule: Schedule) -> DraftTokens:
        return of_lists()


class StumblesProposer(RecordingProposer):
    def __init__(self, **arguments: Any) -> None:
        super().__init__(**arguments)
        len(self.num_speculative_tokens)  # type: ignore[arg-type]


class ForgetfulProposer(RecordingProposer):
    def __init__(self, *, num_speculative_tokens: int, context: ProposerContext) -> None:
        pass


class NotAProposer:
    """Has the method, is no Proposer."""

    def propose(self, schedule: Schedule) -> DraftTokens:
        return of_lists()


def a_function() -> None:
    """Not even a class."""


# what propose returns for two requests that may draft three tokens each -> the rule it breaks, and what was found
MISTAKES: dict[str, tuple[Callable[[], Any], str]] = {
    "nothing": (lambda: None, r"return DraftTokens, got None"),
    "lists": (lambda: [[1], [2]], r"return DraftTokens, got \[\[1\], \[2\]\]"),
    "too few requests": (lambda: of_lists([1]), r"give drafts for the 2 decoding requests, got 1"),
    "too many requests": (lambda: of_lists([1], [2], [3]), r"give drafts for the 2 decoding requests, got 3"),
    "too many drafts": (lambda: of_lists([1] * 4, [1]), r"at most max_draft_tokens \(\[3, 3\]\), got \[4, 1\]"),
    "a negative number of drafts": (
        lambda: replace(GOOD, cu_num_draft_tokens=[0, 4, 3]), r"at most max_draft_tokens .*, got \[4, -1\]",
    ),
    "counts that start late": (
        lambda: replace(GOOD, cu_num_draft_tokens=[1, 2, 3]), r"start cu_num_draft_tokens with 0, got \[1, 2, 3\]",
    ),
    "counts as a tensor": (
        lambda: replace(GOOD, cu_num_draft_tokens=torch.tensor([0, 2, 3])), r"as a list of ints, .*, got tensor\(",
    ),
    "no list of counts": (lambda: replace(GOOD, cu_num_draft_tokens=None), r"as a list of ints, .*, got None"),
    "counts that are no integers": (
        lambda: replace(GOOD, cu_num_draft_tokens=[0, 2.0, 3.0]), r"as a list of ints, .*, got \[0, 2.0, 3.0\]",
    ),
    "ids in a list": (lambda: replace(GOOD, token_ids=[1, 2, 3]), r"token_ids as a tensor, got list"),
    "probs in a list": (lambda: replace(GOOD, probs=[[1.0]]), r"probs as a tensor, got list"),
    "no counts": (lambda: replace(GOOD, cu_num_draft_tokens=[]), r"start cu_num_draft_tokens with 0, got \[\]"),
    "another number of ids": (
        lambda: replace(GOOD, token_ids=torch.zeros(4, dtype=torch.int64)), r"token_ids of shape \[3\], got \[4\]",
    ),
    "ids in two dimensions": (
        lambda: replace(GOOD, token_ids=torch.zeros(1, 3, dtype=torch.int64)), r"of shape \[3\], got \[1, 3\]",
    ),
    "int32": (lambda: replace(GOOD, token_ids=GOOD.token_ids.int()), r"dtype int64, got torch.int32"),
    "float": (lambda: replace(GOOD, token_ids=GOOD.token_ids.float()), r"dtype int64, got torch.float32"),
    "another device": (lambda: replace(GOOD, token_ids=GOOD.token_ids.to("meta")), r"token_ids on cpu, got meta"),
    "an id behind the vocabulary": (lambda: of_lists([1, 64], [3]), r"tokens in \[0, 63\].*, got \[1, 64, 3\]"),
    "a negative id": (lambda: of_lists([1, -1], [3]), r"tokens in \[0, 63\].*, got \[1, -1, 3\]"),
    "too few probs": (
        lambda: replace(GOOD, probs=torch.full((2, VOCAB_SIZE), 1 / 64)), r"give probs \[3, 64\].*, got \[2, 64\]",
    ),
    "probs of another vocabulary": (
        lambda: replace(GOOD, probs=torch.full((3, 63), 1 / 63)), r"give probs \[3, 64\], or None, got \[3, 63\]",
    ),
    "parents on the device": (
        lambda: replace(GOOD, parent_indices=torch.tensor([-1, -1, -1])),
        r"parent_indices as a list of 3 ints, on the host, got tensor",
    ),
    "too few parents": (lambda: replace(GOOD, parent_indices=[-1, 0]), r"a list of 3 ints, .*, got \[-1, 0\]"),
    "a parent behind its child": (
        lambda: replace(GOOD, parent_indices=[1, -1, -1]),
        r"their place among .*before their children, or -1, got \[1, -1\]",
    ),
    "a parent of another request": (
        lambda: replace(GOOD, parent_indices=[-1, 0, 1]), r"among the request's own drafts, .*, got \[1\]",
    ),
    "a tree with empty slots": (
        lambda: replace(GOOD, parent_indices=[-1, 0, -1], is_padded=True), r"fill every slot of a draft tree",
    ),
    "equal siblings": (
        lambda: replace(of_lists([7, 7], [3]), parent_indices=[-1, -1, -1]), r"distinct siblings, got \[7, 7\]",
    ),
    "siblings drawn with replacement": (
        lambda: replace(GOOD, parent_indices=[-1, -1, -1], probs=torch.full((3, VOCAB_SIZE), 1 / 64)),
        r"given the earlier ones, 0 at their tokens .*, got for 2 a distribution that allows \[1\]",
    ),
}  # fmt: skip


@pytest.mark.parametrize("mistake", MISTAKES)
def test_drafts_that_would_corrupt_the_step_are_refused_with_the_rule(
    engines: Engines, monkeypatch: pytest.MonkeyPatch, mistake: str
) -> None:
    given, rule = MISTAKES[mistake]
    llm = engines(custom("MistakenProposer"))
    monkeypatch.setattr(MistakenProposer, "given", given())
    with pytest.raises(UserError, match=f"^MistakenProposer.propose must .*{rule}.*; mend the proposer") as error:
        llm.generate(PROMPTS, PARAMS)
    assert "\n" not in str(error.value)
    llm.engine.block_manager.check_integrity([])


def test_good_drafts_of_uneven_length_are_taken(engines: Engines, monkeypatch: pytest.MonkeyPatch) -> None:
    """The mistakes above are one step away from drafts that run; and after a mistake, the engine runs on."""
    llm = engines(custom("MistakenProposer"))
    plain = engines().generate(PROMPTS, replace(PARAMS, max_tokens=3))
    monkeypatch.setattr(MistakenProposer, "given", None)
    with pytest.raises(UserError):
        llm.generate(PROMPTS, PARAMS)
    truth = [list(answer.outputs[0].token_ids) for answer in plain]
    monkeypatch.setattr(MistakenProposer, "given", of_lists([truth[0][1]], []))
    first, second = llm.generate(PROMPTS[:2], [replace(PARAMS, max_tokens=3), replace(PARAMS, max_tokens=2)])
    assert list(first.outputs[0].token_ids) == truth[0]
    assert list(second.outputs[0].token_ids) == truth[1][:2]


# options of RecordingProposer -> what the message says of them
MISTAKEN_OPTIONS: dict[str, tuple[dict[str, Any], str]] = {
    "unknown to the class": (
        {"window": 8, "tag": 1}, r"context, speculative_config\.options \(window, tag\).*'window'",
    ),
    "unknown behind **arguments": (
        {"window": 8}, r"take speculative_config\.options\.window: .*'window'; mend speculative_config\.options, or",
    ),
    "the engine's": ({"context": 1}, r"other than num_speculative_tokens and context, got 'context'"),
    "no JSON": ({"tag": CPU}, r"\.options.* not a valid JSON value"),
}  # fmt: skip


@pytest.mark.parametrize("mistake", MISTAKEN_OPTIONS)
def test_options_that_the_class_cannot_take_are_refused_before_the_run(mistake: str) -> None:
    """Behind **arguments they were a traceback."""
    options, rule = MISTAKEN_OPTIONS[mistake]
    name = "StumblesProposer" if "**" in mistake else "RecordingProposer"
    engine_args = {"device": "cpu", "load_format": "dummy", "hf_config": TARGET_CONFIG}
    with pytest.raises(UserError, match=rule):
        LLM("dummy", speculative_config=custom(name, **options), **engine_args)


# path behind method.model -> what the message says of it
UNUSABLE = {
    "tests.test_custom_class.SaysNothing": r"define propose; see proposers/base\.py",
    "tests.test_custom_class.TakesOther": r"take num_speculative_tokens and context: missing .*'num_tokens'; see",
    "tests.test_custom_class.ForgetfulProposer": r"call super\(\)\.__init__\(num_speculative_tokens=.*in its __init__",
    "tests.test_custom_class.NotAProposer": r"name a subclass of proposers\.base\.Proposer, got .*NotAProposer",
    "tests.test_custom_class.a_function": r"name a subclass of proposers\.base\.Proposer, got .*a_function",
    "tests.test_custom_class.Mispelt": r"be the dotted path of a Proposer class.*'Mispelt'.*check the spelling",
    "no_such_module.MyProposer": r"be the dotted path.*No module named 'no_such_module'.*PYTHONPATH",
    "MyProposer": r"be a dotted path to a class.*got 'MyProposer'",
}


@pytest.mark.parametrize("path", UNUSABLE)
def test_a_class_that_cannot_be_used_is_refused_before_the_run(path: str) -> None:
    engine_args = {"device": "cpu", "load_format": "dummy", "hf_config": TARGET_CONFIG}
    with pytest.raises(UserError, match=rf"\.model.* must {UNUSABLE[path]}"):
        LLM("dummy", speculative_config={**custom(""), "model": path}, **engine_args)


def test_a_bug_of_the_class_is_not_its_signature() -> None:
    """A TypeError from inside __init__ was told as wrong arguments, without a traceback."""
    engine_args = {"device": "cpu", "load_format": "dummy", "hf_config": TARGET_CONFIG}
    with pytest.raises(TypeError, match="object of type 'int' has no len"):
        LLM("dummy", speculative_config=custom("StumblesProposer"), **engine_args)


@pytest.mark.parametrize(
    ("text", "rule"),
    [
        (
            "import no_such_package",
            "cannot import all it needs: No module named 'no_such_package'; install that package",
        ),
        ("from pathlib import Nothing", "cannot import all it needs: cannot import name 'Nothing' from 'pathlib'"),
        ("x = 1\ndef f(:", r"broken_proposer\.py:2 is no valid Python: invalid syntax; mend it"),
    ],
)
def test_a_module_that_cannot_be_imported_is_not_a_wrong_path(
    text: str, rule: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The package that a module lacks was told as a misspelt method.model, broken syntax as a traceback."""
    (tmp_path / "broken_proposer.py").write_text(text)
    monkeypatch.syspath_prepend(tmp_path)
    engine_args = {"device": "cpu", "load_format": "dummy", "hf_config": TARGET_CONFIG}
    with pytest.raises(UserError, match=rf"^speculative_config\.model=broken_proposer\.MyProposer: .*{rule}"):
        LLM("dummy", speculative_config={**custom(""), "model": "broken_proposer.MyProposer"}, **engine_args)


def test_a_custom_class_without_a_path_is_refused() -> None:
    engine_args = {"device": "cpu", "load_format": "dummy", "hf_config": TARGET_CONFIG}
    with pytest.raises(UserError, match=r"\.model"):
        LLM("dummy", speculative_config={"method": "custom_class", "num_speculative_tokens": 2}, **engine_args)


def test_a_custom_class_is_told_what_the_built_in_ones_are_told(engines: Engines) -> None:
    """Its cache beside the target's, each step, and the end of each request."""
    llm = engines(custom("RecordingProposer", tag={"sizes": [1, 2]}), num_gpu_blocks_override=20)
    inner = llm.engine.proposer.inner  # type: ignore[attr-defined]
    assert inner.tag == {"sizes": [1, 2]}
    assert inner.num_speculative_tokens == 3
    assert (inner.context.vocab_size, inner.context.device, inner.context.max_model_len) == (VOCAB_SIZE, CPU, 256)
    assert llm.engine.proposer.cache_bytes_per_block == 10
    assert inner.events == ["allocate 21"], "with the null block"
    inner.events.clear()
    llm.generate(PROMPTS, [PARAMS, replace(PARAMS, max_tokens=1)])
    assert inner.events[:3] == ["propose", "update", "release 1"]
    assert inner.events.count("propose") == inner.events.count("update") > 2
    assert "release 0" in inner.events


def test_hidden_states_that_the_target_does_not_have_are_refused(
    engines: Engines, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The step raised KeyError: 3."""
    monkeypatch.setattr(RecordingProposer, "tap_layers", (-1, 3))
    with pytest.raises(UserError, match=r"^RecordingProposer\.tap_layers must hold -1 .* or 0 to 2, .*got \[-1, 3\]"):
        engines(custom("RecordingProposer", num_speculative_tokens=5))


def test_a_preempted_request_is_released_before_it_comes_back(engines: Engines) -> None:
    """A draft model that kept its count would take void blocks for its own: no token changes, every guess is wrong."""
    llm = engines(custom("RecordingProposer"), num_gpu_blocks_override=3)
    requests, _ = complete(llm, PROMPTS, [replace(PARAMS, max_tokens=30)] * 2)
    events = llm.engine.proposer.inner.events  # type: ignore[attr-defined]
    assert requests[1].num_preemptions > 0
    last_step = len(events) - 1 - events[::-1].index("propose")
    assert "release 1" in events[:last_step] and "release 0" not in events[: events.index("release 1")]


def test_a_method_without_keys_of_its_own_is_one_file_and_one_yaml(
    engines: Engines, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """The schema knew only the methods that it has a class for, and refused the name."""
    (tmp_path / "shy.py").write_text(
        "from proposers.base import Proposer\n"
        "class ShyProposer(Proposer):\n"
        "    def propose(self, schedule):\n"
        "        raise NotImplementedError\n"
    )
    (tmp_path / "method").mkdir()
    (tmp_path / "method" / "shy.yaml").write_text("defaults: [/common_method_keys@_here_, _self_]\nmethod: shy\n")
    monkeypatch.setattr(proposers, "__path__", [*proposers.__path__, str(tmp_path)])
    spec = importlib.util.spec_from_file_location("union_read_again", method_union.__file__)
    assert spec is not None and spec.loader is not None
    union = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, spec.name, union)
    spec.loader.exec_module(union)
    with Composer(config_dir=str(tmp_path)) as composer:
        values = composer.compose(["method=shy", "method.num_speculative_tokens=2"]).method
    config: Any = SimpleNamespace(method=union.parse_method(values)[0])
    tokenizer: Any = None
    proposer = build_proposer(config, engines().engine.proposer.context, tokenizer)
    monkeypatch.delitem(sys.modules, "proposers.shy")
    monkeypatch.delattr(proposers, "shy")
    assert (type(proposer).__name__, proposer.num_speculative_tokens) == ("ShyProposer", 2)
    with pytest.raises(UserError, match="got 'shyy'; did you mean 'shy'"):
        union.parse_method({"method": "shyy"})
    with pytest.raises(UserError, match=r"window is an unknown key, got 3.*class in runner/config/ .* AnyMethod in"):
        union.parse_method({"method": "shy", "window": 3})
    (tmp_path / "method" / "shy.yaml").unlink()
    with (
        pytest.raises(UserError, match=r"got 'shy'; proposers/shy\.py wants a conf/method/shy\.yaml"),
        Composer(config_dir=str(tmp_path)) as composer,
    ):
        composer.config(["method=shy"])


class LastTokenAgainProposer(Proposer):
    """Guesses that the last token comes again, and keeps what it was told."""

    drafts_from_text = True
    seen: ClassVar[list[tuple[int, int, int, int, int]]] = []

    def propose(self, schedule: Schedule) -> DraftTokens:
        guesses = []
        for item in schedule.decoding:
            request = item.request
            left = request.sampling_params.max_tokens - len(request.output_token_ids)
            told = (item.start, request.num_computed_tokens, request.num_tokens, item.max_draft_tokens, left)
            self.seen.append(told)
            guesses.append([request.last_token_id] * item.max_draft_tokens)
        return draft_tokens_from_lists(guesses, self.context.device)


class LearningProposer(LastTokenAgainProposer):
    num_updates: ClassVar[int] = 0

    def update(self, schedule: Schedule, output: VerifyOutput) -> None:
        type(self).num_updates += 1


class TreeProposer(LastTokenAgainProposer):
    def propose(self, schedule: Schedule) -> DraftTokens:
        return replace(of_lists(*([[1, 2]] * len(schedule.decoding))), parent_indices=[-1, -1] * len(schedule.decoding))


def test_steps_run_whole_around_drafts_from_the_text_and_the_schedule_is_of_the_step(engines: Engines) -> None:
    """Bug told here: items said where the first of the whole steps began."""
    params = [replace(PARAMS, max_tokens=40), replace(PARAMS, max_tokens=30)]
    plain, _ = complete(engines(), PROMPTS, params)
    LastTokenAgainProposer.seen.clear()
    requests, metrics = complete(engines(custom("LastTokenAgainProposer")), PROMPTS, params)
    assert [own.output_token_ids for own in requests] == [own.output_token_ids for own in plain]
    assert metrics.steps_in_parts.total() == 0 and len(LastTokenAgainProposer.seen) > 10
    for start, num_computed, num_tokens, limit, left in LastTokenAgainProposer.seen:
        assert start == num_computed == num_tokens - 1
        assert limit == min(3, left - 1)


def test_a_class_that_learns_from_its_steps_has_them_in_parts(engines: Engines) -> None:
    LearningProposer.num_updates = 0
    _, metrics = complete(engines(custom("LearningProposer")), PROMPTS, [PARAMS] * 2)
    assert metrics.steps_in_parts.total() == metrics.num_decoding_steps < LearningProposer.num_updates


class SaidTreeProposer(LastTokenAgainProposer):
    """Two guesses beside each other."""

    drafts_trees = True

    def propose(self, schedule: Schedule) -> DraftTokens:
        counts = [min(item.max_draft_tokens, 2) for item in schedule.decoding]
        return replace(of_lists(*([1, 2][:count] for count in counts)), parent_indices=[-1] * sum(counts))


class NoTreeProposer(LastTokenAgainProposer):
    drafts_trees = True


def test_steps_run_whole_around_trees_from_the_text_where_the_class_says_that_it_drafts_them(engines: Engines) -> None:
    params = [replace(PARAMS, max_tokens=40), replace(PARAMS, max_tokens=30)]
    plain, _ = complete(engines(), PROMPTS, params)
    requests, metrics = complete(engines(custom("SaidTreeProposer")), PROMPTS, params)
    assert [own.output_token_ids for own in requests] == [own.output_token_ids for own in plain]
    assert metrics.steps_in_parts.total() == 0
    drafted = [(record.num_draft_tokens, record.draft_depths) for record in metrics.records]
    assert all(depths and (2, 1) in zip(counts, depths, strict=True) for counts, depths in drafted)
    with pytest.raises(UserError, match="propose must draft trees without probs, as drafts_from_text and drafts_trees"):
        complete(engines(custom("NoTreeProposer")), PROMPTS, params)


def test_a_class_whose_drafts_are_not_what_it_says_is_told(engines: Engines) -> None:
    with pytest.raises(UserError, match="propose must draft chains without probs, as drafts_from_text says, got"):
        complete(engines(custom("TreeProposer")), PROMPTS, [PARAMS] * 2)
