"""python -m runner.benchmarks.vllm: what can be shown of the comparison where no vLLM is installed."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from rich.console import Console

from runner.benchmarks import offline_engine, vllm
from runner.benchmarks.engine_process import EngineProcess, EngineRefusedError, Start
from runner.benchmarks.offline_engine import Answer, Batch, OfflineEngine
from runner.benchmarks.turns import PLAIN, take_turns
from runner.benchmarks.vllm_report import TEMPERATURES, THIS, VLLM, Case, Found, as_json, print_tables
from runner.engine.errors import UserError
from runner.tiny import TARGET_DIR

REASON = "ImportError: Arctic Inference is required for suffix decoding."
LENGTHS = ["--prompt-len", "4", "--output-len", "3"]


class EchoLLM:
    """vLLM's LLM in miniature: says the prompt's first token and the seed, drafts two and accepts one every time.

    It can be asked again only once it has forgotten what it was asked before.
    """

    def __init__(self) -> None:
        self.num_drafts = 0
        self.known: set[tuple[int, ...]] = set()

    def reset_prefix_cache(self) -> bool:
        self.known.clear()
        return True

    def generate(self, prompts: list[Any], params: list[dict[str, Any]], *, use_tqdm: bool) -> list[Any]:
        asked = {tuple(prompt["prompt_token_ids"]) for prompt in prompts}
        assert not asked & self.known, "a prompt would be found in the cache, not computed"
        self.known |= asked
        self.num_drafts += 1
        said = [
            (prompt["prompt_token_ids"][0], param["seed"] or 0, len(prompts))[: param["max_tokens"]]
            for prompt, param in zip(prompts, params, strict=True)
        ]
        return [SimpleNamespace(outputs=[SimpleNamespace(token_ids=tokens)]) for tokens in said]

    def get_metrics(self) -> list[Any]:
        names = ("vllm:spec_decode_num_drafts", "vllm:spec_decode_num_accepted_tokens")
        return [SimpleNamespace(name=name, value=self.num_drafts) for name in names]


def open_echo(*, counts_drafts: bool = True, **_: Any) -> OfflineEngine:
    print("ready, says", os.environ.get("ECHO"))
    return OfflineEngine(EchoLLM(), dict, "cpu", counts_drafts=counts_drafts)


def open_echo_without_suffix(*, speculative_config: dict[str, Any] | None, **arguments: Any) -> OfflineEngine:
    if speculative_config is not None and speculative_config["method"] == "suffix":
        raise ImportError("not installed")
    return open_echo(**arguments)


def open_nothing(**_: Any) -> OfflineEngine:
    raise ValueError("no such\n  method")


def open_and_end(**_: Any) -> OfflineEngine:
    print("last words", flush=True)
    os._exit(3)


class SameProcess:
    """EngineProcess without a process of its own, which takes seconds to start."""

    def __init__(
        self, build: Any, arguments: dict[str, Any], *, environment: dict[str, str], log: Path, opened: list[Any]
    ) -> None:
        opened.append((build, arguments, environment))
        try:
            engine = build(**arguments)
        except (ImportError, ValueError) as error:
            raise EngineRefusedError(f"{type(error).__name__}: {error}") from error
        self.complete = engine.complete
        self.start = Start(seconds=1.0, num_threads=torch.get_num_threads(), device=engine.device)

    def close(self) -> None:
        pass


def answer(*texts: tuple[int, ...], seconds: float = 1.0, drafts: int = 0, accepted: int = 0) -> Answer:
    return Answer(seconds=seconds, texts=texts, num_drafts=drafts, num_accepted_tokens=accepted, num_threads=1)


@pytest.fixture
def found() -> Found:
    """Two methods, of which vLLM refuses the second, and whose seeded texts differ on vLLM under the first."""
    found = Found(methods=[PLAIN, "ngram", "suffix"], batch_sizes=[1, 16], refusals={(VLLM, "suffix"): REASON})
    for case in found.cases():
        for temperature in TEMPERATURES:
            changes = case == Case(VLLM, "ngram", 16) and temperature > 0
            drafts, accepted = (0, 0) if case.method == PLAIN else (4, 6)
            found.answers[case, temperature] = answer(
                (1, 2), (3, 9 if changes else 4), drafts=drafts, accepted=accepted
            )
        found.start_seconds[case.engine, case.method] = [2.0, 1.0]
        speed = 100.0 * case.batch_size * (2 if case.method == "ngram" else 1)
        found.rounds[case.name] = [speed * (0.5 if case.engine == VLLM else 1.0) * drift for drift in (1, 2, 4)]
    return found


def test_the_tables_show_ratios_identical_texts_and_refusals(found: Found, capsys: pytest.CaptureFixture[str]) -> None:
    print_tables(found, "title", Console(width=200))
    rows = [[cell.strip() for cell in line.split("│")[1:-1]] for line in capsys.readouterr().out.splitlines()]
    assert ["none, one at a time", "200", "100", "2.00x (2.00 to 2.00)"] in rows, "drift cancels round by round"
    assert ["ngram, 16 at once", "6,400 (2.00x)", "3,200 (2.00x)", "2.00x (2.00 to 2.00)"] in rows
    assert ["suffix, one at a time", "200 (1.00x)", "refused", ""] in rows
    assert ["none, one at a time", *["2 of 2"] * 4] in rows
    assert ["ngram, 16 at once", "2 of 2", "2 of 2", "2 of 2", "1 of 2"] in rows
    assert ["suffix, 16 at once", "2 of 2", "refused", "2 of 2", "refused"] in rows
    assert ["none", "", "", "", "", "2.0 and 1.0", "2.0 and 1.0"] in rows
    assert ["suffix", "2.50", "refused", "2.50", "refused", "2.0 and 1.0", "refused"] in rows


def test_a_refusal_stands_below_the_tables_word_for_word(found: Found, capsys: pytest.CaptureFixture[str]) -> None:
    print_tables(found, "title", Console(width=200))
    last = capsys.readouterr().out.splitlines()[-2:]
    assert last == [
        "2 of 2 greedy texts of plain decoding are the same on both engines",
        f"vLLM, suffix: refused: {REASON}",
    ]


def test_the_json_has_what_the_tables_have(found: Found) -> None:
    written = json.loads(json.dumps(as_json(found)))
    assert written["refused"] == {"vLLM, suffix": REASON}
    assert written["ratios"]["this engine, none, 16 at once / vLLM, none, 16 at once"]["median"] == 2
    assert written["ratios"]["vLLM, ngram, one at a time / vLLM, none, one at a time"]["p80"] == 2
    texts = written["texts"]["vLLM, ngram, 16 at once, temperature 0.8"]
    assert (texts["identical"], texts["texts"], texts["mean_acceptance_length"]) == (1, 2, 2.5)
    assert written["tokens_per_second"].keys() == {case.name for case in found.cases()}


def test_contestants_take_turns_and_the_first_round_warms_up() -> None:
    turns: list[str] = []

    def contestant(name: str) -> Any:
        return lambda: turns.append(name) or float(len(turns))  # type: ignore[func-returns-value]

    rounds = take_turns({"a": contestant("a"), "b": contestant("b")}, 2)
    assert turns == ["a", "b"] * 3
    assert rounds == {"a": [3.0, 5.0], "b": [4.0, 6.0]}


def test_an_engine_in_a_process_answers_batch_by_batch(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    log = tmp_path / "log"
    process = EngineProcess(open_echo, {}, environment={"ECHO": "echo", "OMP_NUM_THREADS": "1"}, log=log)
    assert (process.start.num_threads, process.start.device) == (1, "cpu") and "ECHO" not in os.environ
    prompts = [[7], [8], [9]]
    greedy = process.complete(Batch(prompts=prompts, batch_size=2, output_len=3))
    seeded = process.complete(Batch(prompts=prompts, batch_size=1, output_len=3, temperature=0.8))
    process.close()
    assert greedy.texts == [(7, 0, 2), (8, 0, 2), (9, 0, 1)], "two calls, of two prompts and of one"
    assert seeded.texts == [(7, 0, 1), (8, 1, 1), (9, 2, 1)], "a prompt's seed is its index, whatever its batch"
    assert greedy.mean_acceptance_length == 2 and (greedy.num_drafts, seeded.num_drafts) == (2, 3)
    assert log.read_text() == "ready, says echo\n" and capfd.readouterr().out == ""


def test_what_keeps_an_engine_from_starting_is_its_refusal_on_one_line(tmp_path: Path) -> None:
    with pytest.raises(EngineRefusedError, match=r"^ValueError: no such method$"):
        EngineProcess(open_nothing, {}, environment={}, log=tmp_path / "log")


def test_a_process_that_dies_before_it_is_ready_refuses_with_its_status_and_last_words(tmp_path: Path) -> None:
    with pytest.raises(EngineRefusedError, match=r"^its process ended with status 3, .*last words$"):
        EngineProcess(open_and_end, {}, environment={}, log=tmp_path / "log")


def test_a_process_that_dies_later_is_one_error_with_its_status(tmp_path: Path) -> None:
    process = EngineProcess(open_echo, {}, environment={}, log=tmp_path / "log")
    process._process.kill()
    process._process.join()
    batch = Batch(prompts=[[1]], batch_size=1, output_len=2)
    with pytest.raises(UserError, match="its process ended with status -9"):
        process.complete(batch)
    process.close()


@pytest.fixture
def opened(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Echoes for engines; what each of them was built with, in order."""
    opened: list[Any] = []
    monkeypatch.setattr(vllm, "PAUSE_SECONDS", 0.0)
    monkeypatch.setattr(vllm, "find_spec", lambda name: object())
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(vllm, "EngineProcess", partial(SameProcess, opened=opened))
    monkeypatch.setattr(vllm, "BUILDERS", {THIS: open_echo, VLLM: open_echo_without_suffix})
    return opened


@pytest.mark.usefixtures("opened")
def test_a_whole_run_compares_and_writes_its_conditions(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "vllm.json"
    assert vllm.main(["--rounds", "1", "--methods", "ngram", *LENGTHS, "--json", str(file)]) == 0
    found = json.loads(file.read_text())
    assert found["conditions"]["methods"].keys() == {PLAIN, "ngram"} and found["conditions"]["rounds"] == 1
    assert {"cpu", "commit", "versions"} <= found.keys() and "vllm" in found["versions"]
    assert found["texts"]["vLLM, ngram, 16 at once, temperature 0.8"]["identical"] == 16
    assert found["texts"]["vLLM, ngram, one at a time, temperature 0"]["identical"] == 0, "the echo says its batch size"
    assert all(len(seconds) == 2 for seconds in found["start_seconds"].values())
    assert "ngram, 16 at once" in capsys.readouterr().out


def test_both_sides_have_the_same_threads_and_configuration_and_vllm_counts_only_while_untimed(
    opened: list[Any],
) -> None:
    assert vllm.main(["--rounds", "1", "--methods", "eagle3", *LENGTHS]) == 0
    mine, theirs = ([each[1:] for each in opened if each[0] is vllm.BUILDERS[engine]] for engine in (THIS, VLLM))
    assert mine == theirs, "arguments and environment"
    assert [arguments["counts_drafts"] for arguments, _ in theirs] == [True, True, False, False]
    assert [arguments["speculative_config"] for arguments, _ in theirs] == [None, vllm.METHODS["eagle3"]] * 2
    threads = torch.get_num_threads()
    assert all(environment["OMP_NUM_THREADS"] == str(threads) for _, environment in theirs)
    assert all(arguments["num_threads"] == threads for arguments, _ in theirs)


@pytest.mark.usefixtures("opened")
def test_a_refused_method_is_shown_and_not_timed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "vllm.json"
    assert vllm.main(["--rounds", "1", "--methods", "suffix", *LENGTHS, "--json", str(file)]) == 0
    found = json.loads(file.read_text())
    assert found["refused"] == {"vLLM, suffix": "ImportError: not installed"}
    assert "this engine, suffix, 16 at once" in found["tokens_per_second"]
    assert not any(name.startswith("vLLM, suffix") for name in found["tokens_per_second"])
    assert "vLLM, suffix: refused: ImportError: not installed" in capsys.readouterr().out


@pytest.mark.usefixtures("opened")
@pytest.mark.parametrize(
    ("builders", "message"),
    [
        ({VLLM: open_nothing}, "error: vLLM must start with method none, got ValueError: no such"),
        ({THIS: open_nothing}, "error: this engine must start with method none, got ValueError: no such"),
    ],
)
def test_nothing_is_compared_with_an_engine_that_cannot_decode(
    builders: dict[str, Any], message: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(vllm, "BUILDERS", {**vllm.BUILDERS, **builders})
    assert vllm.main(LENGTHS) == 2
    assert message in capsys.readouterr().err


def test_prompts_begin_alike_as_far_as_asked_for() -> None:
    prompts = vllm._prompts(vllm._parse(["--prompt-len", "9", "--prefix-len", "5"]))
    assert len({tuple(prompt[:5]) for prompt in prompts}) == 1
    assert len({tuple(prompt[:6]) for prompt in prompts}) > 1
    assert {len(prompt) for prompt in prompts} == {9} and len(prompts) == 16
    assert "prompt 9 (5 shared)" in vllm._title(
        vllm._parse(["--prompt-len", "9", "--prefix-len", "5"]), {"vllm": "1", "torch": "2"}
    )


def test_other_threads_than_asked_for_end_the_comparison() -> None:
    """vLLM computes with one thread where OMP_NUM_THREADS is not set: ratios would compare machines."""
    with pytest.raises(vllm.UserError, match="both sides must compute with --threads 2 threads, got 1"):
        vllm._checked(answer((1,)), vllm._parse(["--threads", "2"]))


def test_a_missing_vllm_is_one_line_with_the_remedy(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(vllm, "find_spec", lambda name: None)
    assert vllm.main([]) == 2
    shown = capsys.readouterr()
    assert shown.err.startswith("error: vLLM must be installed") and "pip install vllm" in shown.err
    assert shown.err.count("\n") == 1 and shown.out == ""


@pytest.fixture(scope="module")
def imported() -> list[str]:
    """What a process says that imports the comparison where there is no vLLM, word by word; "", then its errors."""
    code = (
        "import sys; sys.modules['vllm'] = None; import runner.benchmarks.vllm; print('llvmlite' in sys.modules); "
        "import runner.benchmarks.offline_engine, runner.benchmarks.vllm_report; print('all')"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    return [*done.stdout.split(), "", done.stderr]


def test_vllm_is_not_imported_before_an_engine_of_it_is_built(imported: list[str]) -> None:
    assert imported[1:2] == ["all"], imported


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--methods", "medusa"], "invalid choice: 'medusa'"),
        (["--rounds", "0"], "--rounds: must be an integer >= 1, got '0'"),
        (["--prefix-len", "64"], "--prefix-len must lie in [0, 63], got 64"),
        (["--output-len", "1000"], "must be 1024 tokens together at most, the target's context, got 64 and 1000"),
    ],
)
def test_a_mistaken_option_is_refused_with_the_remedy(
    options: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit, match="2"):
        vllm.main(options)
    assert message in capsys.readouterr().err


def test_help_says_what_is_compared(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="0"):
        vllm.main(["--help"])
    shown = capsys.readouterr().out
    assert all(option in shown for option in ("--threads", "--methods", "--rounds", "--json", "eagle3"))


def test_what_opens_an_engine_has_not_loaded_llvmlite(imported: list[str]) -> None:
    """vLLM's build for CPUs looks through all modules that are loaded, and fails at llvmlite's."""
    assert imported[0] == "False", imported


def test_weights_that_a_directory_holds_are_both_engines(tmp_path: Path) -> None:
    """Of a mixture of experts random weights of either's own drawing send rows to other experts, and to fewer."""
    assert offline_engine._weights(None) == {"model": str(TARGET_DIR)}
    assert offline_engine._weights(str(tmp_path)) == {"model": str(tmp_path), "load_format": "dummy"}
    (tmp_path / "model.safetensors").touch()
    assert offline_engine._weights(str(tmp_path)) == {"model": str(tmp_path)}


def test_this_engine_reads_a_directory_that_holds_a_config_alone(tmp_path: Path) -> None:
    """No tokenizer is asked for there, as vLLM is told to ask for none."""
    config = {
        "model_type": "llama",
        "vocab_size": 50,
        "hidden_size": 32,
        "intermediate_size": 32,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "max_position_embeddings": 64,
    }
    (tmp_path / "config.json").write_text(json.dumps(config), encoding="utf-8")
    engine = offline_engine.open_this_engine(
        model=str(tmp_path),
        max_model_len=16,
        speculative_config=None,
        dtype="float32",
        num_threads=torch.get_num_threads(),
        counts_drafts=False,
    )
    answer = engine.complete(Batch(prompts=[[3, 4, 5]], batch_size=1, output_len=4))
    assert [len(text) for text in answer.texts] == [4]
    (tmp_path / "hf_quant_config.json").write_text('{"quantization": {"quant_algo": "FP8"}}', encoding="utf-8")
    stated = offline_engine._config(str(tmp_path))["quantization_config"]
    assert stated == {"quant_method": "modelopt", "quant_algo": "FP8"}


def test_another_model_is_compared_by_its_config_alone(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "llama", "vocab_size": 50, "max_position_embeddings": 64}')
    for arguments, message in (
        (["--model", str(tmp_path), "--methods", "ngram"], "--methods must be left out with --model"),
        (["--model", str(tmp_path / "none")], "--model must be a directory with a config.json"),
        (["--model", str(tmp_path), "--prompt-len", "64"], "must be 64 tokens together at most"),
    ):
        with pytest.raises(SystemExit):
            vllm.main(arguments)
        assert message in capsys.readouterr().err
    opened: list[Any] = []
    monkeypatch.setattr(vllm, "EngineProcess", partial(SameProcess, opened=opened))
    monkeypatch.setattr(vllm, "BUILDERS", {THIS: open_echo, VLLM: open_echo})
    monkeypatch.setattr(vllm, "_require_vllm", lambda: None)
    monkeypatch.setattr(vllm, "PAUSE_SECONDS", 0.0)
    assert vllm.main([*LENGTHS, "--model", str(tmp_path), "--dtype", "bfloat16", "--rounds", "1"]) == 0
    for _, arguments, _ in opened:
        asked = {key: arguments[key] for key in ("model", "dtype", "speculative_config", "max_model_len")}
        assert asked == {"model": str(tmp_path), "dtype": "bfloat16", "speculative_config": None, "max_model_len": 7}
    assert {PLAIN} == {method for method in vllm.METHODS if f"{method}, one at a time" in capsys.readouterr().out}
