"""The report of a run: one HTML page that can be shown around, made from what the run folder holds."""

from evenstep.tools.report.page import write_report

__all__ = ["write_report"]
