"""How Sphinx makes the site from these pages: `make site`."""

from __future__ import annotations

import csv
import os
import re
import sys
from importlib import import_module
from pathlib import Path
from typing import Any

from docutils import nodes
from sphinx.application import Sphinx
from sphinx.directives.patches import CSVTable

ROOT = str(Path(__file__).resolve().parents[1])
sys.path.insert(0, ROOT)
os.environ["PYTHONPATH"] = os.pathsep.join([ROOT, *filter(None, [os.environ.get("PYTHONPATH")])])  # of notebooks

project = "Dovetail"
release = import_module("dovetail").__version__
author = copyright = "the authors of Dovetail"  # the name is Sphinx's
extensions = ["myst_nb"]
exclude_patterns = ["_build", "**.ipynb_checkpoints"]
language = "en"
nitpicky = True

myst_enable_extensions = ["colon_fence"]
myst_heading_anchors = 4
nb_execution_mode = "force"
nb_execution_timeout = 120
nb_execution_raise_on_error = True
nb_merge_streams = True

html_theme = "furo"
html_static_path = ["_static"]
html_css_files = ["pages.css"]
html_title = f"Dovetail {release}"
html_show_sphinx = False
html_show_copyright = False
html_copy_source = False
html_show_sourcelink = False
html_show_search_summary = False  # would fetch pages, which browsers refuse for files
# All that a page loads lies in the site: it works from a folder, without a network.
html_theme_options: dict[str, Any] = {"navigation_with_keys": True}
pygments_style = "default"


class Figures(CSVTable):  # type: ignore[misc]
    """The directive `figures NAME`: the table docs/figures/NAME.csv; its title says when and by which command it was
    measured (docs/figures/figures.csv), and links the data."""

    required_arguments, optional_arguments = 1, 0

    def run(self) -> list[Any]:
        """The table, integers with separators."""
        (name,), env = self.arguments, self.state.document.settings.env
        folder = Path(env.srcdir) / "figures"
        depth = "../" * env.docname.count("/")
        with (folder / "figures.csv").open(newline="", encoding="utf-8") as file:
            known = {row["table"]: row for row in csv.DictReader(file)}[name]
        measured = f"{known['measured']}, {known['machine']}: `{known['command']}`"
        self.arguments = [f"[{name}.csv]({depth}figures/{name}.csv), measured {measured}"]
        self.options |= {"file": f"{depth}figures/{name}.csv", "header-rows": 1, "align": "left"}
        env.note_dependency(str(folder / "figures.csv"))
        found = list(super().run())
        for entry in (entry for table in found for entry in table.findall(nodes.entry)):
            if re.fullmatch(r"[-+]?[\d,.]+( %| s| dB)?", entry.astext()):
                entry["classes"].append("figure")
        return found

    def parse_csv_data_into_rows(self, csv_data: Any, dialect: Any, source: Any) -> Any:
        """What docutils does, with `12,345` in place of the cell `12345`."""
        rows = [[f"{int(cell):,}" if cell.isdigit() else cell for cell in row] for row in csv.reader(csv_data)]
        lines = [",".join(f'"{cell.replace(QUOTE, QUOTE * 2)}"' for cell in row) for row in rows]
        return super().parse_csv_data_into_rows(lines, dialect, source)


QUOTE = '"'


def setup(app: Sphinx) -> None:
    """What Sphinx calls first."""
    app.add_directive("figures", Figures)
