"""What somebody may have meant by a name that there is not."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Sequence

# What people call some values elsewhere, and spellings alone would take for another one.
OTHER_NAMES = {"gpu": "cuda", "half": "float16", "fp16": "float16", "bf16": "bfloat16", "fp32": "float32"}


def did_you_mean(word: str, options: Iterable[str]) -> str:
    """A remedy that names the closest options, or all of them when none is close."""
    options = sorted(options)
    if close := nearest(word, options):
        return "did you mean " + " or ".join(repr(option) for option in close) + "?"
    return f"known: {', '.join(options)}" if options else ""


def nearest(word: str, options: Iterable[str]) -> list[str]:
    """At most two options: those spelled alike, else those of which the word has all parts or beginnings
    of them (`max_dept`, `num_spec`)."""
    options = list(options)
    if (other := OTHER_NAMES.get(word)) in options:
        return [str(other)]
    ratios = {option: difflib.SequenceMatcher(None, option, word).ratio() for option in options}
    best = max(ratios.values(), default=0.0)
    alike = [option for option, ratio in ratios.items() if ratio >= max(0.6, best - 0.2)]
    if alike:
        return sorted(alike, key=lambda option: -ratios[option])[:2]
    parts = word.split("_")
    return [
        option
        for option in ratios
        if (len(word) > 2 and option.startswith(word))
        or (len(parts) > 1 and all(_has_part(option.split("_"), part) for part in parts))
    ][:2]


def _has_part(own: Sequence[str], part: str) -> bool:
    return any(name.startswith(part) for name in own) or bool(difflib.get_close_matches(part, own, cutoff=0.8))
