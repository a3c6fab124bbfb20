"""`python -m runner.benchmarks.{decoding,generate,ngram,suffix,vllm}`: programs that check first, then measure."""
