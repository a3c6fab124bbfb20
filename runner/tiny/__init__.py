"""The tiny model family: where its committed files lie.

`target` and `draft` are plain Hugging Face model directories that share one tokenizer; `HEAD_DIRS` has a trained draft
head for every method that needs one, each in the layout in which such heads are published. `demo.jsonl` is the demo
workload and `manifest.json` says how the checkpoints came about. The recipe that writes them is
`python -m runner.tiny`; nothing here imports it.
"""

from pathlib import Path

TINY_DIR = Path(__file__).parent
TARGET_DIR = TINY_DIR / "target"
DRAFT_DIR = TINY_DIR / "draft"
HEAD_DIRS = {
    method: TINY_DIR / method for method in ("eagle", "eagle3", "mtp", "medusa", "mlp_speculator", "pard", "dflash")
}
# A method is measured with 4 guesses where its head does not fix another number: Medusa has one head per guess, and
# DFlash guesses a block in one pass.
NUM_SPECULATIVE_TOKENS = {"draft_model": 4, "ngram": 4} | {
    method: {"medusa": 3, "dflash": 7}.get(method, 4) for method in HEAD_DIRS
}
DEMO_PATH = TINY_DIR / "demo.jsonl"
MANIFEST_PATH = TINY_DIR / "manifest.json"
