"""Numbers as text, in one way everywhere; None is "-"."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

BAR_WIDTH = 16
_EIGHTHS = " ▏▎▍▌▋▊▉"


def number(value: float | None, pattern: str = "{:,}") -> str:
    return "-" if value is None else pattern.format(value)


def printable(text: str) -> str:
    """A user's text with its control characters as escapes: a terminal would act on them."""
    return re.sub(r"[\x00-\x1f\x7f-\x9f]", lambda found: ascii(found[0])[1:-1], text)


def shares_of_steps(steps: Mapping[Any, int]) -> str:
    """What most of them had comes first, what less than one in a hundred had is left out: "4 (97%), 2 (2%)"."""
    total = sum(steps.values())
    common = sorted(((count, each) for each, count in steps.items() if 100 * count >= total), reverse=True)
    return ", ".join(f"{each} ({count / total:.0%})" for count, each in common)


def percent(value: float | None) -> str:
    return number(value, "{:.1%}")


def times(value: float | None) -> str:
    """A speed-up."""
    return number(value, "{:.2f}x")


def ranged(text: str, ends: tuple[float, float], pattern: str) -> str:
    """A median with the lowest and highest of its repeats: "1.31x (1.20 to 1.51)"."""
    return f"{text} ({pattern.format(ends[0])} to {pattern.format(ends[1])})"


def speedup_style(value: float | None) -> str:
    """Green for faster than plain decoding, red for slower, yellow within 2 %, where a repetition may turn it over."""
    if value is None:
        return ""
    return "bold green" if value > 1.02 else "bold red" if value < 0.98 else "bold yellow"


def mebibytes(value: int | None) -> str:
    return number(None if value is None else value / 2**20, "{:,.0f} MiB")


def latency(value: Mapping[str, float | None]) -> str:
    """Median with its spread: "2.13 ms (p20 1.98, p80 2.40, p99 3.31)"."""
    if value["median"] is None:
        return "-"
    spread = ", ".join(f"{name} {number(value[name], '{:.2f}')}" for name in ("p20", "p80", "p99"))
    return f"{value['median']:.2f} ms ({spread})"


def identical(value: Mapping[str, int] | str | None, lossless: str | bool | None = None) -> str:
    """Identical requests of all: "40/40", and what qualifies that; "-" where there is nothing to say."""
    if value is None and lossless is False:
        return "lossy"
    count = f"{value['identical']}/{value['requests']}" if isinstance(value, Mapping) else value
    mark = "unguaranteed" if lossless == "unguaranteed" else None
    return ", ".join(text for text in (count, mark) if text) or "-"


def identical_style(value: Mapping[str, int] | str | None, lossless: str | bool | None = None) -> str:
    if value is None:
        return "bold red" if lossless is False else ""
    same, _, all_requests = identical(value).partition("/")
    return "bold green" if same == all_requests else "bold red"


def method_title(row: Mapping[str, Any]) -> str:
    """The method, what it drafts, and whether it is lossy: "ngram, 4 tokens, lossy", "eagle3, tree of 8 nodes"."""
    k = row["num_speculative_tokens"]
    tokens = f"{k} token{'s' * (k != 1)}" if row.get("draft_tree_depth") is None else f"tree of {k} nodes"
    title = f"{row['method']}, {tokens}" if k else str(row["method"])
    return f"{title}, lossy" if row.get("lossless") is False else title


def machine_title(machine: Mapping[str, Any]) -> str:
    """Device, version of torch and commit, for a run's `machine` or a row of a comparison."""
    commit = (machine.get("commit") or "")[:7]
    torch = f"torch {machine['torch']}" if machine.get("torch") else ""
    return ", ".join(text for text in (machine.get("device_name"), torch, commit and f"commit {commit}") if text)


def numbers_of(machine: Mapping[str, Any]) -> str:
    """What a run computes with: "bfloat16", "bfloat16 with weights in fp8 and a KV cache in fp8"."""
    dtype = machine["dtype"]
    others = [
        f"{what} in {machine[key]}"
        for key, what in (("weights", "weights"), ("kv_cache", "a KV cache"))
        if machine.get(key) not in (None, dtype)
    ]
    return " with ".join((dtype, *([" and ".join(others)] if others else [])))


def bar(share: float | None, *, ascii_only: bool) -> str:
    """A share of 1 as a bar of BAR_WIDTH characters, in steps of an eighth of one."""
    if share is None:
        return " " * BAR_WIDTH
    if ascii_only:
        return ("#" * round(share * BAR_WIDTH)).ljust(BAR_WIDTH)
    full, eighths = divmod(round(share * BAR_WIDTH * 8), 8)
    return ("█" * full + (_EIGHTHS[eighths] if eighths else "")).ljust(BAR_WIDTH)
