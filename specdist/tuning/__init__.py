"""What jobs/tune.py does: collect an exhaustive trace, replay policies on it, and choose one."""

from specdist.tuning.config import TuneConfig
from specdist.tuning.report import console_report, summary, write_report
from specdist.tuning.run import run_tuning

__all__ = ["TuneConfig", "console_report", "run_tuning", "summary", "write_report"]
