"""specdist against transformers: same models, prompts and lengths, in one run."""

from specdist.benchmark.config import BenchmarkConfig
from specdist.benchmark.profile import profile_report, run_profile
from specdist.benchmark.report import console_report, summary, update_readme
from specdist.benchmark.run import run_benchmark

__all__ = [
    "BenchmarkConfig",
    "console_report",
    "profile_report",
    "run_benchmark",
    "run_profile",
    "summary",
    "update_readme",
]
