"""Reports of run records: a page to read them on, and the README's table of results."""

from headstart.evidence.report.markdown import NOTHING, fill_block, markdown
from headstart.evidence.report.page import page
from headstart.evidence.report.reading import RunFile, read_runs, run_paths

__all__ = ["NOTHING", "RunFile", "fill_block", "markdown", "page", "read_runs", "run_paths"]
