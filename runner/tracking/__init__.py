"""Where runs are recorded: MLflow, a line in runs/runs.jsonl, or nowhere, behind one small interface.

`open_tracker` gives the tracker of one run, `start_sweep` MLflow's parent of many; both are context managers whose run
ends FINISHED, FAILED or KILLED as the block does. Other sweeps are compared by `collecting_rows`, from what `add_row`
says. Nothing here is called in the decode loop. MLflow is imported by tracking=mlflow alone, so everything else runs
without it.
"""

from runner.tracking.jsonl import RUNS_FILE
from runner.tracking.opening import check_store, open_tracker, start_sweep
from runner.tracking.sweep_file import add_row, collecting_rows
from runner.tracking.tracker import PARENT_RUN_ENV, Tracker

__all__ = [
    "PARENT_RUN_ENV",
    "RUNS_FILE",
    "Tracker",
    "add_row",
    "check_store",
    "collecting_rows",
    "open_tracker",
    "start_sweep",
]
