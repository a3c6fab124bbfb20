"""The tiny model family: its names and where its committed files lie.

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
    method: TINY_DIR / method
    for method in ("eagle", "eagle3", "mtp", "medusa", "mlp_speculator", "pard", "dflash", "dspark")
}
# A method is measured with 4 guesses where its head does not fix another number: Medusa has one head per guess, and
# DFlash and DSpark guess a block in one pass.
NUM_SPECULATIVE_TOKENS = {"draft_model": 4, "ngram": 4} | {
    method: {"medusa": 3, "dflash": 7, "dspark": 7}.get(method, 4) for method in HEAD_DIRS
}
DEMO_PATH = TINY_DIR / "demo.jsonl"
MANIFEST = "manifest.json"  # of a family, in its directory

TARGET_NAME = "tiny"
DRAFT_NAME = "tiny-draft"
HEAD_NAMES = {method: f"tiny-{method.replace('_', '-')}" for method in HEAD_DIRS}
BUILT_IN_MODELS = {
    TARGET_NAME: TARGET_DIR,
    DRAFT_NAME: DRAFT_DIR,
    **{HEAD_NAMES[method]: directory for method, directory in HEAD_DIRS.items()},
}
# The keys of the model group that name the family's own drafters, as conf/model/tiny.yaml does.
DRAFTER_KEYS = {
    "draft": {"model": DRAFT_NAME},
    "heads": {method: {"model": name} for method, name in HEAD_NAMES.items()},
}
