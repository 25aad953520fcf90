"""`dovetail report` and `dovetail compare`: a run's costs in detail, as JSON, tables and HTML pages."""

from __future__ import annotations

from typing import TYPE_CHECKING

from dovetail.names import names

if TYPE_CHECKING:
    from dovetail.run import RunResult


def run_page(result: RunResult) -> str:
    """The HTML page of `dovetail report` for a run."""
    from dovetail.guests.report.detail import detail
    from dovetail.guests.report.page import page

    return page(detail(result))


if not TYPE_CHECKING:
    __getattr__ = names(
        __name__,
        {"dovetail.report": ("Report", "make_report", "print_report")},
        Activity="dovetail.report.ReportActivity",
    )
