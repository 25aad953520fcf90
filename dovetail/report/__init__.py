"""What a run cost, per layer and in total: data, JSON and tables."""

from dovetail.report.report import SCHEMA, Activity, Layer, MemoryUse, Report, Totals, make_report
from dovetail.report.table import print_report

__all__ = ["SCHEMA", "Activity", "Layer", "MemoryUse", "Report", "Totals", "make_report", "print_report"]
