"""Figures that pages show: each table is a file docs/figures/NAME.csv, which a page includes by its name.

`docs/figures/figures.csv` says of each table when, on what machine and by which command it was measured. A page has

    ```{figures} NAME
    ```

docs/conf.py makes the table of it. Tests check that tables and pages belong together, and assert no figure.
"""

from __future__ import annotations

import argparse
import csv
import os
import platform
from collections.abc import Callable, Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path

FIGURES = Path(__file__).resolve().parents[1] / "docs" / "figures"
INDEX = FIGURES / "figures.csv"
COLUMNS = ("table", "measured", "machine", "command")

Rows = Sequence[Sequence[object]]
"""A table: the first row has the names of the columns; integers are integers."""
Sections = Mapping[str, Callable[[], Mapping[str, Rows]]]
"""Name of a section -> the function that measures it: name of a file -> its table."""


def machine() -> str:
    """Class of this machine, e.g. `x86_64, 2 cores`; simulated cycles do not depend on it, times do."""
    return f"{platform.machine()}, {os.cpu_count()} cores"


def read(path: Path) -> list[list[str]]:
    """Rows of a CSV file, its head first."""
    with path.open(newline="", encoding="utf-8") as file:
        return list(csv.reader(file))


def put(path: Path, rows: Rows) -> None:
    """Write a CSV file."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w", newline="", encoding="utf-8") as file:
        csv.writer(file, lineterminator="\n").writerows(rows)


def write(tables: Mapping[str, Rows], command: str) -> None:
    """Write tables to docs/figures, with date, machine and command in the index.

    Args:
        tables: name of a file -> table.
        command: what measures them, without `--write`.
    """
    known = {row[0]: row for row in read(INDEX)[1:]} if INDEX.is_file() else {}
    for name, rows in tables.items():
        put(FIGURES / f"{name}.csv", rows)
        known[name] = [name, f"{datetime.now(UTC):%Y-%m-%d}", machine(), command]
    put(INDEX, [COLUMNS, *(known[name] for name in sorted(known))])


def show(tables: Mapping[str, Rows]) -> None:
    """Print tables in columns."""
    for name, rows in tables.items():
        cells = [[f"{cell:,}" if isinstance(cell, int) else str(cell) for cell in row] for row in rows]
        widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
        print(f"\n{name}")
        for row in cells:
            print("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip(), flush=True)


def run(description: str, script: str, sections: Sections, needed: Sequence[Path] = ()) -> None:
    """Measure the sections that the command line names, print them, and write them with --write.

    Args:
        description: what the script does, in one sentence.
        script: its path from the repository, for the index.
        sections: all there are.
        needed: folders without which nothing can be measured.
    """
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("sections", nargs="*", metavar="SECTION", help=f"of {', '.join(sections)}; none: all")
    parser.add_argument("--write", action="store_true", help="write the tables to docs/figures")
    arguments = parser.parse_args()
    if unknown := set(arguments.sections) - set(sections):
        parser.error(f"unknown sections: {', '.join(sorted(unknown))}")
    for folder in needed:
        if not folder.is_dir():
            parser.error(f"{folder.name} is not here: it lies in ../shared")
    for section in arguments.sections or sections:
        tables = sections[section]()
        show(tables)
        if arguments.write:
            write(tables, f"python {script} {section}")
