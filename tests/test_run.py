"""A whole run: what it measures, what it writes, and how it ends when it does not end well."""

from __future__ import annotations

import gzip
import itertools
import json
import math
import shutil
from importlib.metadata import version
from pathlib import Path
from typing import Any

import mlflow
import pytest

from runner import measure
from runner.config import JsonlWorkload, SpeculativeConfig
from runner.engine.errors import UserError
from runner.engine.schedule import CommittedTokens
from runner.metrics import CoreWait
from runner.run import execute
from runner.step_loop import StepLoop
from runner.tiny import DRAFT_DIR
from runner.tracking import PARENT_RUN_ENV
from runner.workload import WorkloadItem, arrival_times, read_workload
from tests.conftest import Engines

KEYS = {
    "method", "num_requests", "num_output_tokens", "num_drafts", "num_draft_tokens", "num_accepted_tokens",
    "acceptance_rate", "mean_acceptance_length", "mean_acceptance_length_per_request", "tokens_per_step",
    "acceptance_per_position", "conditional_acceptance_per_position", "output_tokens_per_second", "ttft_ms", "tpot_ms",
    "itl_ms", "time_share", "speedup", "identical_to_baseline", "peak_memory_bytes",
}  # fmt: skip


ONE_BY_ONE = {"name": "demo", "limit": 4, "max_concurrency": 1}


def config(**changes: Any) -> SpeculativeConfig:
    values: dict[str, Any] = {
        "model": {"model": "tiny", "draft": {"model": "tiny-draft"}},
        "method": {"method": "draft_model"},
        "sampler": {"temperature": 0.0, "max_tokens": 12},
        "workload": {"name": "demo", "limit": 4},
        "tracking": "none",
        "hardware": {"num_gpu_blocks_override": 320},  # 30 MB of KV, not 400
    }
    return SpeculativeConfig.parse(values | changes)


@pytest.fixture(scope="module")
def empty_database(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """MLflow takes a second or more to make one."""
    path = tmp_path_factory.mktemp("store") / "mlflow.db"
    mlflow.MlflowClient(f"sqlite:///{path}").search_experiments()
    return path


@pytest.fixture
def store(tmp_path: Path, empty_database: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.delenv(PARENT_RUN_ENV, raising=False)
    shutil.copyfile(empty_database, tmp_path / "mlflow.db")
    return f"sqlite:///{tmp_path}/mlflow.db"


def test_a_run_measures_writes_and_logs_the_same_numbers(tmp_path: Path, store: str) -> None:
    summary = execute(config(tracking="mlflow", tracking_uri=store), tmp_path)
    assert summary.keys() >= KEYS
    assert summary["identical_to_baseline"] == {"requests": 4, "identical": 4}
    assert summary["speedup"] > 0
    assert json.loads((tmp_path / "metrics.json").read_text()) == summary

    rows = [json.loads(line) for line in (tmp_path / "outputs.jsonl").read_text().splitlines()]
    assert [row["request_id"] for row in rows] == ["0", "1", "2", "3"]
    assert sum(len(row["token_ids"]) for row in rows) == summary["num_output_tokens"]
    assert sum(map(sum, (row["num_accepted_tokens"] for row in rows))) == summary["num_accepted_tokens"]

    client = mlflow.MlflowClient(store)
    (experiment,) = [entry for entry in client.search_experiments() if entry.name == "speculative-runner"]
    (run,) = client.search_runs([experiment.experiment_id])
    assert run.info.status == "FINISHED"
    assert run.data.metrics["acceptance_rate"] == pytest.approx(summary["acceptance_rate"])
    assert run.data.params["method.num_speculative_tokens"] == "4"
    machine = summary["machine"]
    assert (machine["device"], machine["dtype"], machine["torch"]) == ("cpu", "float32", version("torch"))
    tagged = ("device", "device_name", "dtype", "num_threads", "torch", "triton", "transformers")
    assert [run.data.tags[key] for key in tagged] == [str(machine[key]) for key in tagged]
    assert {file.path for file in client.list_artifacts(run.info.run_id)} == {
        "metrics.json",
        "outputs.jsonl",
        "vllm_speculative_config.json",
        "vllm_speculative_config.txt",
    }
    assert json.loads((tmp_path / "vllm_speculative_config.json").read_text())["model"] == str(DRAFT_DIR)
    series = [key for key in run.data.metrics if key.startswith("step/")]
    assert series


def test_a_wait_for_a_core_in_any_pass_makes_the_whole_measurement_doubtful(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shares = iter([0.4, 0.01])  # plain decoding's pass, the method's
    monkeypatch.setattr(CoreWait, "share", lambda _: next(shares))
    hardware = {"num_gpu_blocks_override": 320, "num_threads": 1}
    summary = execute(config(method={"method": "ngram"}, hardware=hardware), tmp_path)
    assert summary["core_wait_share"] == 0.4
    (note,) = [note for note in summary["notes"] if "waited for a core 40%" in note]
    assert "lower hardware.num_threads=1" in note


def test_a_drafter_that_guesses_fewer_tokens_than_were_asked_of_it_is_told(tmp_path: Path) -> None:
    for asked in (3, 9):
        method = {"method": "medusa", "model": "tiny-medusa", "num_speculative_tokens": asked}
        summary = execute(config(baseline=False, method=method), tmp_path / str(asked))
        expected = "9 tokens were asked of medusa, whose drafter guesses 3 ahead: so many are drafted"
        assert [note for note in summary["notes"] if "asked of" in note] == [expected] * (asked == 9)


def test_without_a_baseline_there_is_no_speedup_and_no_comparison(tmp_path: Path) -> None:
    summary = execute(config(baseline=False, method={"method": "ngram"}), tmp_path)
    assert summary["speedup"] is None
    assert summary["identical_to_baseline"] is None
    assert (summary["lossless"], summary["notes"]) == ("tokens", [])


def test_tokens_are_not_recorded_as_kept_where_the_promise_is_off(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The record said "tokens" whatever the hardware's settings, and only the terminal had the note."""
    monkeypatch.chdir(tmp_path)
    values = {"num_gpu_blocks_override": 320, "batch_invariant": False}
    changes = {"workload": {"name": "demo", "limit": 1}, "method": {"method": "ngram"}, "tracking": "jsonl"}
    summary = execute(config(hardware=values, **changes), tmp_path)
    assert summary["lossless"] == "unguaranteed"
    assert summary["notes"][0] == "bitwise promise off: hardware.batch_invariant=false"
    (line,) = (tmp_path / "runs" / "runs.jsonl").read_text().splitlines()
    recorded = json.loads(line)
    assert (recorded["tags"]["lossless"], recorded["summary"]["notes"]) == ("unguaranteed", summary["notes"])


def test_parameters_in_a_line_are_numbers_where_the_configuration_has_numbers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All were text, as MLflow wants them: "4", "False", "None"."""
    monkeypatch.chdir(tmp_path)
    values = {"num_gpu_blocks_override": 320, "enforce_eager": True}
    changes = {"workload": {"name": "demo", "limit": 1}, "method": {"method": "ngram"}, "tracking": "jsonl"}
    execute(config(hardware=values, **changes), tmp_path, written={"sampler": "greedy", "seed": "0"})
    params = json.loads((tmp_path / "runs" / "runs.jsonl").read_text())["params"]
    assert (params["seed"], params["sampler"], params["method.num_speculative_tokens"]) == (0, "greedy", 4)
    assert (params["hardware.enforce_eager"], params["run_name"], params["sampler.stop"]) == (True, None, [])


def test_a_rule_that_keeps_only_the_distribution_is_not_compared_when_sampling(tmp_path: Path) -> None:
    method = {"method": "draft_model", "rejection_sample_method": "probabilistic"}
    sampled = execute(config(method=method, sampler={"temperature": 1.0, "max_tokens": 8}), tmp_path)
    assert (sampled["identical_to_baseline"], sampled["lossless"]) == (None, "distribution")


def test_memory_judged_by_the_noise_that_made_it_is_told(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Requests of one seed draft what that seed's noise has accepted before, so the distribution holds only roughly."""
    for seed, is_told in ((None, False), (3, True)):
        sampler = {"temperature": 1.0, "max_tokens": 8, "seed": seed}
        execute(
            config(method={"method": "suffix", "rejection_sample_method": "probabilistic"}, sampler=sampler), tmp_path
        )
        assert ("keeps it only roughly" in " ".join(capsys.readouterr().out.split())) == is_told


@pytest.mark.parametrize("rule", ["probabilistic", "block"])
def test_at_temperature_zero_every_lossless_rule_is_compared(tmp_path: Path, rule: str) -> None:
    method = {"method": "draft_model", "rejection_sample_method": rule}
    greedy = execute(config(method=method, repeats=2), tmp_path)
    assert greedy["identical_to_baseline"] == greedy["identical_between_repeats"] == {"requests": 4, "identical": 4}
    assert greedy["speedup_range"]["lowest"] <= greedy["speedup"] <= greedy["speedup_range"]["highest"]
    assert greedy["lossless"] == "tokens"


def test_a_lossy_run_says_so_in_its_files_its_summary_and_the_tracker(
    tmp_path: Path, store: str, capsys: pytest.CaptureFixture[str]
) -> None:
    method = {"method": "ngram", "rejection_sample_method": "typical"}
    execute(config(method=method, tracking="mlflow", tracking_uri=store), tmp_path)
    assert json.loads((tmp_path / "metrics.json").read_text())["lossless"] is False
    text = " ".join(capsys.readouterr().out.split())
    assert "ngram, 4 tokens, lossy" in text
    assert "note: lossy: rejection_sample_method=typical keeps neither" in text
    client = mlflow.MlflowClient(store)
    (run,) = client.search_runs([entry.experiment_id for entry in client.search_experiments()])
    assert run.data.tags["lossless"] == "false"
    assert run.data.tags["notes"].startswith("lossy: rejection_sample_method=typical keeps neither")


def test_the_synthetic_rule_accepts_at_the_rate_it_is_set_to(tmp_path: Path) -> None:
    method = {"method": "ngram", "rejection_sample_method": "synthetic", "synthetic_acceptance_length": 3.0}
    method |= {"prompt_lookup_min": 1, "prompt_lookup_max": 3}
    summary = execute(config(method=method, sampler={"temperature": 0.0, "max_tokens": 61}), tmp_path)
    # Of all schedules with this mean the one that varies least: two of four guesses in every full draft.
    assert summary["conditional_acceptance_per_position"][:3] == [1.0, 1.0, 0.0]
    assert summary["identical_to_baseline"] is None


def test_a_request_that_cannot_run_fails_alone(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "prompts.jsonl"
    lines = [{"prompt": "def f(x):"}, {"prompt": "x = 1\n" * 2000, "id": "long"}]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    summary = execute(config(workload={"name": "jsonl", "path": str(path)}), tmp_path)
    assert (summary["num_requests"], summary["num_failed_requests"]) == (1, 1)
    printed = capsys.readouterr()
    assert f"request 1 (id long, {path}:2) failed" in "\n".join(summary["notes"])
    answered, failed = (json.loads(line) for line in (tmp_path / "outputs.jsonl").read_text().splitlines())
    assert (failed["id"], failed["error"][:31]) == ("long", "the prompt must be shorter than")
    assert answered.keys().isdisjoint(("id", "error"))
    last = printed.err.splitlines()[-1]  # 30 of 31 could fail, and only a word in the box said so
    place = f"request 1 (id long, {path}:2)"
    assert last.startswith(f"1 of 2 requests failed; {place}: the prompt must be shorter than ")
    assert "1/2 requests (1 failed) in " in printed.err, "it was 2/2"


def test_where_nothing_could_run_the_first_reason_is_told(engines: Engines) -> None:
    """Of more than three failures the error named outputs.jsonl, which is not written then."""
    items = [WorkloadItem(prompt={"prompt_token_ids": [5] * length}, id=length) for length in range(24, 29)]
    with pytest.raises(
        UserError,
        match=r"^no request of the workload could run; request 0 \(id 24\) failed: the prompt must be shorter than",
    ):
        measure.measure(engines(max_model_len=24), items)


def test_lines_have_lengths_and_temperatures_of_their_own_and_arrive_at_a_rate(tmp_path: Path) -> None:
    lines = [{"prompt": "x = ", "max_tokens": 3, "source": "me"}, {"prompt": "y = ", "temperature": 1.0, "id": "b"}]
    (tmp_path / "prompts.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    workload = {"name": "jsonl", "path": str(tmp_path / "prompts.jsonl"), "request_rate": 20.0}
    method = {"method": "draft_model", "rejection_sample_method": "probabilistic"}
    summary = execute(config(workload=workload, method=method), tmp_path)
    first, second = (json.loads(line) for line in (tmp_path / "outputs.jsonl").read_text().splitlines())
    assert (len(first["token_ids"]), len(second["token_ids"])) == (3, 12)
    assert [first["arrival"], second["arrival"]] == pytest.approx(arrival_times(2, 20.0, 0))
    assert (summary["lossless"], summary["identical_to_baseline"]) == ("distribution", None), "one line is sampled"
    unread = "workload.path has fields that no run reads: source (read are the prompt, id, category, "
    assert any(note.startswith(unread) for note in summary["notes"])
    with pytest.raises(
        UserError, match=r"prompts\.jsonl:1 has max_tokens=3: min_tokens must be in \[0, max_tokens \(3\)\]"
    ):
        execute(config(workload=workload, sampler={"min_tokens": 5}), tmp_path)


def test_arrivals_are_a_poisson_process_of_the_seed() -> None:
    times = arrival_times(2001, 4.0, 7)
    assert times == arrival_times(2001, 4.0, 7) != arrival_times(2001, 4.0, 8)
    gaps = [later - earlier for earlier, later in itertools.pairwise(times)]
    mean = sum(gaps) / len(gaps)
    assert times[0] == 0.0 and mean == pytest.approx(1 / 4, rel=0.1)
    assert sum(gap > mean for gap in gaps) / len(gaps) == pytest.approx(math.exp(-1), abs=0.05)


def test_a_model_without_files_runs_on_random_weights(tmp_path: Path) -> None:
    shape = {
        "model_type": "llama", "vocab_size": 96, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1,
        "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 16, "max_position_embeddings": 128,
    }  # fmt: skip
    model = {"model": "shape", "load_format": "dummy", "hf_config": shape, "draft": {"model": "d", "hf_config": shape}}
    workload = {"name": "synthetic", "num_requests": 3, "prompt_len": 20}
    summary = execute(config(model=model, workload=workload), tmp_path)
    # The draft has the target's shape, and so the target's weights: every guess is right.
    assert summary["acceptance_rate"] == 1.0
    assert summary["num_output_tokens"] == 3 * 12


@pytest.mark.parametrize("caches", [True, False])
def test_prompts_that_begin_alike_are_computed_once(tmp_path: Path, caches: bool) -> None:
    workload = {"name": "synthetic", "num_requests": 3, "prompt_len": 20, "prefix_len": 40}
    hardware = {"device": "cpu", "enable_prefix_caching": caches}
    summary = execute(config(method={"method": "draft_model"}, workload=workload, hardware=hardware), tmp_path)
    names = ("prefix_cache_queries", "prefix_cache_hits", "prefix_cache_hit_rate")
    assert [summary[name] for name in names] == ([180, 64, 64 / 180] if caches else [0, 0, None])
    assert summary["identical_to_baseline"] == {"requests": 3, "identical": 3}
    lines = [json.loads(line) for line in (tmp_path / "outputs.jsonl").read_text().splitlines()]
    assert [line["num_cached_tokens"] for line in lines] == ([0, 32, 32] if caches else [None] * 3)
    assert len({tuple(line["prompt_token_ids"][:40]) for line in lines}) == 1
    assert len({tuple(line["prompt_token_ids"]) for line in lines}) == 3


def test_a_draft_that_numbers_its_tokens_otherwise_is_refused(tmp_path: Path) -> None:
    other = tmp_path / "draft"
    shutil.copytree(DRAFT_DIR, other)
    tokenizer = json.loads((other / "tokenizer.json").read_text())
    vocab = tokenizer["model"]["vocab"]
    first, second = list(vocab)[300:302]
    vocab[first], vocab[second] = vocab[second], vocab[first]
    (other / "tokenizer.json").write_text(json.dumps(tokenizer))
    with pytest.raises(UserError, match="must number its tokens as"):
        execute(config(method={"method": "draft_model", "model": str(other)}), tmp_path)


@pytest.mark.parametrize("text", ["{", "[]", "{}", '{"model": 5}', '{"model": {}}'])
def test_a_draft_with_a_tokenizer_that_numbers_nothing_is_refused(tmp_path: Path, text: str) -> None:
    """Its tokenizer.json was looked into unasked what it holds, and the run ended in a traceback."""
    other = tmp_path / "draft"
    shutil.copytree(DRAFT_DIR, other)
    (other / "tokenizer.json").write_text(text)
    with pytest.raises(UserError, match=r"method\.model: .*draft/tokenizer\.json must hold .*model\.vocab.*; download"):
        execute(config(method={"method": "draft_model", "model": str(other)}), tmp_path)


def test_an_interrupted_run_is_marked_so_and_leaves_no_result(
    tmp_path: Path, store: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(*_: Any, **__: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(StepLoop, "step", interrupted)
    with pytest.raises(KeyboardInterrupt):
        execute(config(tracking="mlflow", tracking_uri=store), tmp_path)
    client = mlflow.MlflowClient(store)
    runs = client.search_runs([entry.experiment_id for entry in client.search_experiments()])
    assert [run.info.status for run in runs] == ["KILLED"]
    assert not (tmp_path / "metrics.json").exists()


@pytest.mark.parametrize(("method", "where"), [("draft_model", ""), ("none", " in plain decoding's pass")])
def test_an_interrupted_run_keeps_the_requests_that_finished(
    tmp_path: Path,
    store: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    method: str,  # whose pass is interrupted
    where: str,
) -> None:
    """They were thrown away with the run, whether it had been going for a minute or for a night; in the pass of plain
    decoding, which comes first, they were for longer."""
    step = StepLoop.step

    def interrupted_after_two(loop: StepLoop) -> list[CommittedTokens]:
        if len(loop.metrics.records) == 2 and bool(loop.proposer.num_speculative_tokens) == (method != "none"):
            raise KeyboardInterrupt
        return step(loop)

    monkeypatch.setattr(measure, "warm_up", lambda *_, **__: None)
    monkeypatch.setattr(StepLoop, "step", interrupted_after_two)
    with pytest.raises(KeyboardInterrupt):
        execute(config(tracking="mlflow", tracking_uri=store, workload=ONE_BY_ONE), tmp_path)
    path = tmp_path / "partial_outputs.jsonl"
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    assert [(line["request_id"], line["method"]) for line in lines] == [("0", method), ("1", method)]
    assert capsys.readouterr().err.splitlines()[-1] == f"2 of 4 requests had finished{where}: {path}"
    client = mlflow.MlflowClient(store)
    (run,) = client.search_runs([entry.experiment_id for entry in client.search_experiments()])
    assert run.info.status == "KILLED"
    assert [artifact.path for artifact in client.list_artifacts(run.info.run_id)] == ["partial_outputs.jsonl"]
    assert not (tmp_path / "outputs.jsonl").exists()


@pytest.mark.parametrize(
    ("line", "complaint"),
    [
        ("not json", "must be a JSON object"),
        ('{"prompt": "x",', r"1 must be a JSON object, got .*: Expecting .* at column 16; mend"),
        ('["x"]', r'1 must be a JSON object, got a list; write {"prompt": \.\.\.}'),
        ('{"text": "x"}', "1 must have the field 'prompt', and has text; set workload.prompt_field="),
        ('{"prompt": "\\ud800"}', r"1: prompt must be text that UTF-8 can hold, got '\\ud800'"),
        ('{"prompt": "x", "category": "\\udfff"}', r"1: category must be text that UTF-8 can hold, got '\\udfff'"),
        ('{"prompt": "x", "id": ["\\ud800"]}', r"1: id must be text that UTF-8 can hold, got '\\ud800'; mend"),
        ('{"prompt": "x", "\\ud800": 1}', r"1: fields must be text that UTF-8 can hold, got '\\ud800'; mend"),
        ('{"messages": []}', r"1: messages must be a string that .*, got \[\]; mend or remove"),
        ('{"prompt": 7}', "must be a string that is not empty, chat messages or token ids, got 7"),
        (
            '{"prompt": ""}',
            """1: prompt must be a string that is not empty, chat messages or token ids, got ""; mend""",
        ),
        ('{"prompt": {"text": "x"}}', "1: prompt must be a string that .*, got {.text.: .x.}; mend"),
        ('{"prompt": null}', "1: prompt must be a string that .*, got null; mend or remove that line"),
        ('[\n{"prompt": "x"}\n]', r"1 must be a JSON object, got .*; write each entry of .*: jq -c '\.\[\]'"),
        ('{"prompt": "x", "max_tokens": 0}', "1: max_tokens must be >= 1, got 0; mend it, or leave it out"),
        ('{"prompt": "x", "temperature": "hot"}', "1: temperature must be a number, got 'hot'"),
        ('{"prompt": "x", "id": NaN}', "1 must be a JSON object, got .*: NaN is no JSON; mend"),
        ('{"prompt": "x", "id": [-1e999]}', "1 must be a JSON object, got .*: -1e999 is beyond the range of floats"),
        ('{"prompt": {"prompt_token_ids": "abc"}}', r"^request 0 \(.*:1\): prompt_token_ids must be a list"),
        ("", "must hold at least one prompt"),
    ],
)
def test_a_malformed_workload_is_named_by_its_line(tmp_path: Path, line: str, complaint: str) -> None:
    path = tmp_path / "prompts.jsonl"
    path.write_text(line + "\n")
    with pytest.raises(UserError, match=complaint):
        execute(config(workload={"name": "jsonl", "path": str(path)}), tmp_path)


@pytest.mark.parametrize("order", ["le", "be"])
@pytest.mark.parametrize("encoding", ["utf-16", "utf-32"])
def test_a_file_of_wider_characters_is_told_what_it_is(encoding: str, order: str, tmp_path: Path) -> None:
    """UTF-32's mark begins with UTF-16's, and was taken for that."""
    path = tmp_path / "prompts.jsonl"
    path.write_text('\ufeff{"prompt": "x"}', encoding=f"{encoding}-{order}")
    rule = f"which holds {encoding.upper()}; convert it, as with: iconv -f {encoding} -t utf-8"
    with pytest.raises(UserError, match=rule):
        read_workload(JsonlWorkload(name="jsonl", path=str(path)))


def test_a_file_that_is_no_text_in_utf_8_is_named_and_not_a_traceback(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "prompts.jsonl"
    path.write_bytes('{"prompt": "caf\xe9"}\n'.encode("latin1"))
    with pytest.raises(UserError, match=r"workload\.path must be a file in UTF-8, got '.*', which holds byte 0xe9"):
        read_workload(JsonlWorkload(name="jsonl", path=str(path)))
    with pytest.raises(UserError, match=r"workload\.path must be a \.jsonl file, got '.*'; it is a directory"):
        read_workload(JsonlWorkload(name="jsonl", path=str(tmp_path)))
    with pytest.raises(UserError, match=r"workload\.path must be a \.jsonl file, got 'x+'; it does not exist"):
        read_workload(JsonlWorkload(name="jsonl", path="x" * 300))
    with pytest.raises(UserError, match=r"got '/dev/null'; it is not a regular file: write what comes from it to one"):
        read_workload(JsonlWorkload(name="jsonl", path="/dev/null"))
    path.write_bytes(gzip.compress(b'{"prompt": "x"}\n'))
    with pytest.raises(UserError, match=r"which holds gzip's compressed data; decompress it, as with: gzip -dk"):
        read_workload(JsonlWorkload(name="jsonl", path=str(path)))
    monkeypatch.setattr(Path, "open", lambda *_, **__: (_ for _ in ()).throw(PermissionError(13, "Permission denied")))
    with pytest.raises(UserError, match=r"workload\.path must be a file that can be read, got .*: Permission denied"):
        read_workload(JsonlWorkload(name="jsonl", path=str(path)))


def test_a_byte_order_mark_is_no_part_of_the_first_line(tmp_path: Path) -> None:
    path = tmp_path / "prompts.jsonl"
    path.write_text('{"prompt": "x"}\n', encoding="utf-8-sig")
    assert [item.prompt for item in read_workload(JsonlWorkload(name="jsonl", path=str(path)))] == ["x"]


def test_a_line_of_messages_needs_no_prompt_field(tmp_path: Path) -> None:
    """It was refused, the line an API takes, with `set workload.prompt_field`."""
    messages = [{"role": "user", "content": "hi"}]
    path = tmp_path / "prompts.jsonl"
    path.write_text(json.dumps({"messages": messages}) + "\n" + json.dumps({"prompt": "x", "messages": messages}))
    first, second = read_workload(JsonlWorkload(name="jsonl", path=str(path)))
    assert (first.prompt, first.unread_fields) == (messages, ())
    assert (second.prompt, second.unread_fields) == ("x", ("messages",))
    with pytest.raises(UserError, match=r"prompts\.jsonl:1 must have the field 'text', and has messages; set"):
        read_workload(JsonlWorkload(name="jsonl", path=str(path), prompt_field="text"))
    with pytest.raises(UserError, match=r"^request 0 \(.*:1\): chat messages need a tokenizer with a chat template"):
        execute(config(workload={"name": "jsonl", "path": str(path)}), tmp_path)


def test_a_run_that_no_request_can_start_leaves_nothing_behind(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    broken = config(sampler={"structured_outputs": {"regex": "(["}}, tracking="jsonl")
    with pytest.raises(UserError, match=r"no request .* can run; request 0 \(id .*:1\): structured_outputs.regex"):
        execute(broken, tmp_path / "run")
    assert [path.read_text() for path in tmp_path.rglob("*") if path.is_file()] == [""], "runs.jsonl, without a run"


@pytest.mark.parametrize("tracking", ["mlflow", "jsonl"])
def test_a_store_that_cannot_be_used_is_told_before_a_model_is_loaded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, tracking: str
) -> None:
    """It was told when a large one had been loaded for minutes."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("runner.run.load", None)  # calling it would be a TypeError
    for name in ("runs", "notes.db"):
        (tmp_path / name).write_text("not a database, but somebody's notes\n" * 100)
    complaint = {"mlflow": "file is not a database", "jsonl": "tracking=jsonl needs a file .* start from another"}
    with pytest.raises(UserError, match=complaint[tracking]):
        execute(config(tracking=tracking, tracking_uri=f"sqlite:///{tmp_path}/notes.db"), tmp_path / "run")
