"""The tiny model family: where its committed files lie.

`target` and `draft` are plain Hugging Face model directories that share one tokenizer, `demo.jsonl` is
the demo workload and `manifest.json` says how the checkpoints came about. The recipe that writes them is
`python -m runner.tiny.train`; nothing here imports it.
"""

from pathlib import Path

TINY_DIR = Path(__file__).parent
TARGET_DIR = TINY_DIR / "target"
DRAFT_DIR = TINY_DIR / "draft"
DEMO_PATH = TINY_DIR / "demo.jsonl"
MANIFEST_PATH = TINY_DIR / "manifest.json"
