"""Programs that measure: `python -m runner.benchmarks.{generate,ngram,suffix}`, each checked first, then timed."""
