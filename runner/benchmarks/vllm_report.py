"""What a comparison with vLLM found, as tables and as JSON: numbers in, no engine."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from rich.console import Console
from rich.table import Table

from runner.benchmarks.offline_engine import Answer
from runner.benchmarks.turns import PLAIN, ratios
from runner.metrics.rates import percentiles

THIS, VLLM = ENGINES = ("this engine", "vLLM")
TEMPERATURES = (0.0, 0.8)
REFUSED = "refused"


@dataclass(frozen=True)
class Case:
    engine: str
    method: str
    batch_size: int

    @property
    def name(self) -> str:
        return f"{self.engine}, {self.row}"

    @property
    def row(self) -> str:
        return f"{self.method}, {'one at a time' if self.batch_size == 1 else f'{self.batch_size} at once'}"


@dataclass(kw_only=True)
class Found:
    """Filled as a run goes on; what is not there was refused, or not asked for."""

    methods: Sequence[str]
    batch_sizes: Sequence[int]  # the last one is that of the plain texts that all others are held to
    answers: dict[tuple[Case, float], Answer] = field(default_factory=dict)  # at each temperature, untimed
    start_seconds: dict[tuple[str, str], list[float]] = field(default_factory=dict)  # engine, method: in turn
    refusals: dict[tuple[str, str], str] = field(default_factory=dict)  # engine, method
    rounds: dict[str, list[float]] = field(default_factory=dict)  # a case's name: tokens/s

    def cases(self, engines: Iterable[str] = ENGINES) -> list[Case]:
        """Those that have not been refused."""
        return [
            Case(engine, method, batch_size)
            for method in self.methods
            for batch_size in self.batch_sizes
            for engine in engines
            if (engine, method) not in self.refusals
        ]

    def num_identical(self, case: Case, temperature: float) -> tuple[int, int]:
        """Texts that are plain decoding's of the same engine, and texts."""
        plain = Case(case.engine, PLAIN, self.batch_sizes[-1])
        return _num_equal(self.answers[case, temperature], self.answers[plain, temperature])

    def num_common(self, temperature: float) -> tuple[int, int]:
        """Plain decoding's texts that are the same on both engines, and texts."""
        mine, theirs = (self.answers[Case(engine, PLAIN, self.batch_sizes[-1]), temperature] for engine in ENGINES)
        return _num_equal(mine, theirs)

    def speed_ratios(self) -> dict[str, list[float]]:
        """this engine / vLLM, and each engine's methods / its plain decoding, round by round."""
        cases = self.cases()
        pairs = [(Case(THIS, case.method, case.batch_size), case) for case in cases if case.engine == VLLM]
        pairs += [(case, Case(case.engine, PLAIN, case.batch_size)) for case in cases if case.method != PLAIN]
        return {f"{a.name} / {b.name}": ratios(self.rounds, a.name, b.name) for a, b in pairs}


def print_tables(found: Found, title: str, console: Console) -> None:
    """Speeds, texts and the methods themselves; what was refused stands below, in the engine's words."""
    console.print(_speeds(found, title))
    console.print(_texts(found))
    console.print(_methods(found))
    same, texts = found.num_common(0.0)
    console.print(f"{same} of {texts} greedy texts of plain decoding are the same on both engines", highlight=False)
    for (engine, method), reason in found.refusals.items():
        console.print(f"{engine}, {method}: {REFUSED}: {reason}", highlight=False, markup=False)


def as_json(found: Found) -> dict[str, Any]:
    """Everything that the tables show, and the percentiles that they leave out."""
    return {
        "tokens_per_second": {name: percentiles(values) for name, values in found.rounds.items()},
        "ratios": {name: percentiles(values) for name, values in found.speed_ratios().items()},
        "texts": {
            f"{case.name}, temperature {temperature:g}": {
                "identical": found.num_identical(case, temperature)[0],
                "texts": len(answer.texts),
                "num_drafts": answer.num_drafts,
                "num_accepted_tokens": answer.num_accepted_tokens,
                "mean_acceptance_length": answer.mean_acceptance_length,
            }
            for (case, temperature), answer in found.answers.items()
        },
        "same_on_both_engines": {f"{temperature:g}": found.num_common(temperature)[0] for temperature in TEMPERATURES},
        "start_seconds": {", ".join(key): seconds for key, seconds in found.start_seconds.items()},
        "refused": {", ".join(key): reason for key, reason in found.refusals.items()},
    }


def _speeds(found: Found, title: str) -> Table:
    table = Table("tokens/s (x plain decoding)", *ENGINES, "this engine / vLLM (p20 to p80)", title=title)
    by_pair = found.speed_ratios()

    def speed(case: Case) -> str:
        if case.name not in found.rounds:
            return REFUSED
        text = f"{percentiles(found.rounds[case.name])['median']:,.0f}"
        plain = Case(case.engine, PLAIN, case.batch_size)
        pair = by_pair.get(f"{case.name} / {plain.name}")
        return text if pair is None else f"{text} ({percentiles(pair)['median']:.2f}x)"

    for mine in found.cases([THIS]):
        theirs = Case(VLLM, mine.method, mine.batch_size)
        spread = percentiles(by_pair.get(f"{mine.name} / {theirs.name}", []))
        text = (
            "" if spread["median"] is None else f"{spread['median']:.2f}x ({spread['p20']:.2f} to {spread['p80']:.2f})"
        )
        table.add_row(mine.row, speed(mine), speed(theirs), text)
    return table


def _texts(found: Found) -> Table:
    columns = [(engine, temperature) for temperature in TEMPERATURES for engine in ENGINES]
    reference = Case(THIS, PLAIN, found.batch_sizes[-1])
    table = Table(
        "",
        *(f"{engine}, temperature {temperature:g}{', seeded' * (temperature > 0)}" for engine, temperature in columns),
        title=f"texts identical to the same engine's plain decoding ({reference.row})",
    )
    for mine in found.cases([THIS]):
        if mine == reference:
            continue
        cells = []
        for engine, temperature in columns:
            case = Case(engine, mine.method, mine.batch_size)
            is_there = (case, temperature) in found.answers
            cells.append("{} of {}".format(*found.num_identical(case, temperature)) if is_there else REFUSED)
        table.add_row(mine.row, *cells)
    return table


def _methods(found: Found) -> Table:
    columns = [(engine, temperature) for temperature in TEMPERATURES for engine in ENGINES]
    table = Table(
        "",
        *(f"{engine}, temperature {temperature:g}" for engine, temperature in columns),
        *(f"{engine}, first and next start" for engine in ENGINES),
        title="mean acceptance length, and seconds from construction to ready",
    )
    for method in found.methods:
        cells = []
        for engine, temperature in columns:
            answer = found.answers.get((Case(engine, method, found.batch_sizes[-1]), temperature))
            length = None if answer is None else answer.mean_acceptance_length
            cells.append(REFUSED if answer is None else "" if length is None else f"{length:.2f}")
        for engine in ENGINES:
            seconds = found.start_seconds.get((engine, method))
            cells.append(REFUSED if seconds is None else " and ".join(f"{each:.1f}" for each in seconds))
        table.add_row(method, *cells)
    return table


def _num_equal(some: Answer, others: Answer) -> tuple[int, int]:
    return sum(a == b for a, b in zip(some.texts, others.texts, strict=True)), len(some.texts)
