"""What a person sees in the terminal: a progress bar, the summary of a run, the points of a sweep and their comparison.

Readable at 80 columns, in a pipe (no escape codes) and without Unicode. A number that does not exist is "-".
"""

from runner.report.comparison import print_comparison
from runner.report.console import open_console
from runner.report.progress import RunProgress
from runner.report.summary import print_point, print_summary

__all__ = ["RunProgress", "open_console", "print_comparison", "print_point", "print_summary"]
