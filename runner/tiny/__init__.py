"""The tiny model family: where its committed files lie.

`target` and `draft` are plain Hugging Face model directories that share one tokenizer, HEAD_DIRS hold one trained draft
head of every kind in its published layout, `demo.jsonl` is the demo workload and `manifest.json` says how the
checkpoints came about. The recipe that writes them is `python -m runner.tiny.train`; nothing here imports it.
"""

from pathlib import Path

TINY_DIR = Path(__file__).parent
TARGET_DIR = TINY_DIR / "target"
DRAFT_DIR = TINY_DIR / "draft"
HEAD_DIRS = {
    method: TINY_DIR / method for method in ("eagle", "eagle3", "mtp", "medusa", "mlp_speculator", "pard", "dflash")
}
DEMO_PATH = TINY_DIR / "demo.jsonl"
MANIFEST_PATH = TINY_DIR / "manifest.json"
