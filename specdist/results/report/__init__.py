"""A run's report as a page that opens anywhere. Imports no torch."""

from specdist.results.report.page import WrittenReport, write_report

__all__ = ["WrittenReport", "write_report"]
