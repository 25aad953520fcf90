"""Costs of a run, per layer and in total: data, JSON, tables and a page."""

from dovetail.guests.report.report import Report, ReportActivity, make_report, print_report

__all__ = ["Report", "ReportActivity", "make_report", "print_report"]
