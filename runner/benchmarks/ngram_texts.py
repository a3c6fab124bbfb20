"""Texts for the benchmark of prompt lookup: made up, but with passages that come back."""

from __future__ import annotations

import random


def text_of(num_tokens: int, generator: random.Random, vocab_size: int) -> list[int]:
    """About half of it new tokens, half of it passages of 20 to 200 tokens copied from before."""
    text: list[int] = []
    while len(text) < num_tokens:
        size = generator.randint(20, 200)
        if text and generator.random() < 0.5:
            start = generator.randrange(len(text))
            text += text[start : start + size]
        else:
            text += [generator.randrange(vocab_size) for _ in range(size)]
    return text[:num_tokens]


def next_tokens(texts: list[list[int]], num_new: int, num_steps: int) -> list[list[list[int]]]:
    """For each step and context, what a text that now and then quotes itself says next."""
    generator = random.Random(num_new)
    places = [generator.randrange(len(text)) for text in texts]
    steps = []
    for _ in range(num_steps):
        step = []
        for row, text in enumerate(texts):
            if generator.random() < 0.05:
                places[row] = generator.randrange(len(text))
            step.append([text[(places[row] + offset) % len(text)] for offset in range(num_new)])
            places[row] += num_new
        steps.append(step)
    return steps
