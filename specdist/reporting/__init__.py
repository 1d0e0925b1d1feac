"""A run's report as a page that opens anywhere. Imports no torch."""

from specdist.reporting.page import WrittenReport, write_report

__all__ = ["WrittenReport", "write_report"]
