"""specdist against transformers: same models, prompts and lengths, in one run."""

from specdist.benchmark.config import BenchmarkConfig, SyntheticConfig, device_of
from specdist.benchmark.profile import profile_report, run_profile
from specdist.benchmark.readme import update_readme
from specdist.benchmark.run import run_benchmark
from specdist.benchmark.synthetic import build_synthetic
from specdist.benchmark.tables import console_report, summary

__all__ = [
    "BenchmarkConfig",
    "SyntheticConfig",
    "build_synthetic",
    "console_report",
    "device_of",
    "profile_report",
    "run_benchmark",
    "run_profile",
    "summary",
    "update_readme",
]
