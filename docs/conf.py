"""How Sphinx makes the site from these pages: `make site`."""

from __future__ import annotations

import csv
import os
import re
import sys
from importlib import import_module
from pathlib import Path
from typing import Any

from sphinx.addnodes import pending_xref
from sphinx.application import Sphinx
from sphinx.directives.patches import CSVTable
from sphinx.environment import BuildEnvironment
from sphinx.ext.napoleon import Config, GoogleDocstring

ROOT = str(Path(__file__).resolve().parents[1])
sys.path.insert(0, ROOT)
os.environ["PYTHONPATH"] = os.pathsep.join([ROOT, *filter(None, [os.environ.get("PYTHONPATH")])])  # of notebooks

project = "Dovetail"
release = import_module("dovetail").__version__
author = copyright = "the authors of Dovetail"  # the name is Sphinx's
extensions = ["myst_nb", "sphinx.ext.autodoc"]
exclude_patterns = ["_build", "**.ipynb_checkpoints"]
language = "en"
nitpicky = True

myst_enable_extensions = ["colon_fence"]
myst_heading_anchors = 4
nb_execution_mode = "force"
nb_execution_timeout = 120
nb_execution_raise_on_error = True
nb_merge_streams = True

autodoc_member_order = "bysource"
autodoc_typehints_format = "short"
autodoc_preserve_defaults = True
autodoc_default_options = {"members": True}
# The types of others, and what is said in words on a page of its own.
nitpick_ignore_regex = [
    ("py:.*", r"(np|numpy|npt|collections|pathlib|typing|types|onnx|msgspec|importlib)\b.*"),
    (
        "py:.*",
        r"Path|Any|Cut|Names|Types|Callable|Mapping|Sequence|Iterator|Iterable|Literal|Protocol|Enum|enum\.IntEnum",
    ),
    (
        "py:.*",
        r"Console|tempfile\.TemporaryDirectory|dovetail\.run\..*|OnnxBody|tuple\[.*|.*\.OperatorT|.*\.base\.T|.*\._(Kind|Record)|.*\.Work",
    ),
]

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
pygments_style = "friendly"

SECTIONS = Config(napoleon_use_rtype=False, napoleon_use_ivar=True)
OUTSIDE_LITERALS = re.compile(r"(``.*?``)|`([^`]+)`|(?<!\w)(\*+)(?=\w)|(?<=\w)(_)(?=\W|$)")
"""In a docstring: what is a literal already, what is one in Markdown's way, and what reStructuredText would take as
emphasis or as a link."""


def written_plainly(line: str) -> str:
    """A line of a docstring, in which a pair of single backticks is code, and nothing else is markup."""

    def replaced(found: re.Match[str]) -> str:
        done, code, stars, bar = found.groups()
        return done or (f"``{code}``" if code else "\\" + (bar or "\\".join(stars)))

    return OUTSIDE_LITERALS.sub(replaced, line)


def written(lines: list[str]) -> list[str]:
    """The lines of a docstring; an indented paragraph behind one that is not indented is an example."""
    said: list[str] = []
    example = False
    for line in lines:
        indented = line.startswith("    ")
        if indented and not example and said[-1:] == [""] and not said[-2].startswith(" "):
            said += ["::", ""]
            example = True
        example = example and (indented or not line)
        said.append(line if example else written_plainly(line))
    return said


def read_docstring(app: Sphinx, what: str, name: str, obj: Any, options: Any, lines: list[str]) -> None:
    """Sections (Args, Raises) become lists; docstrings of attributes have none, and may have a colon anywhere."""
    if what == "class" and "Attributes:" in lines:  # which have entries of their own
        del lines[lines.index("Attributes:") :]
    lines[:] = written(lines)
    if what not in ("attribute", "data", "property"):
        lines[:] = GoogleDocstring(lines, SECTIONS, app, what, name, obj).lines()


def find_elsewhere(app: Sphinx, env: BuildEnvironment, node: pending_xref, content: Any) -> Any:
    """A class is written about under the module it is imported from, which is not always where it is defined."""
    domain = env.domains["py"]
    last = node.get("reftarget", "").rsplit(".", 1)[-1].strip("~")
    known = [name for name in domain.objects if name.rsplit(".", 1)[-1] == last]
    if not last or node.get("refdomain") != "py" or len(known) != 1:
        return None
    return domain.resolve_xref(env, node["refdoc"], app.builder, "obj", known[0], node, content)


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
        return list(super().run())

    def parse_csv_data_into_rows(self, csv_data: Any, dialect: Any, source: Any) -> Any:
        """What docutils does, with `12,345` in place of the cell `12345`."""
        rows = [[f"{int(cell):,}" if cell.isdigit() else cell for cell in row] for row in csv.reader(csv_data)]
        lines = [",".join(f'"{cell.replace(QUOTE, QUOTE * 2)}"' for cell in row) for row in rows]
        return super().parse_csv_data_into_rows(lines, dialect, source)


QUOTE = '"'


def setup(app: Sphinx) -> None:
    """What Sphinx calls first."""
    app.add_directive("figures", Figures)
    app.connect("autodoc-process-docstring", read_docstring)
    app.connect("missing-reference", find_elsewhere)
