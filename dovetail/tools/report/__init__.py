"""Costs of a run, per layer and in total: data, JSON, tables and a page."""

from dovetail.tools.report.report import Activity, Report, make_report, print_report

__all__ = ["Activity", "Report", "make_report", "print_report"]
