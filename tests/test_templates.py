"""Text templates: words, parts that are shown or left out, and every template of the export."""

from __future__ import annotations

from importlib import resources
from pathlib import Path

import pytest

from dovetail.templates import Template


@pytest.fixture
def template(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Template:
    """A template in a package of its own."""
    package = tmp_path / "with_a_template"
    package.mkdir()
    (package / "__init__.py").touch()
    (package / "t.txt").write_text("begin @name@@more@\n$@ a@b\n@@more\n\n+ @name@@again@\n@@again\n!\n")
    monkeypatch.syspath_prepend(tmp_path)
    return Template("with_a_template", "t.txt")


def test_words_and_parts(template: Template) -> None:
    assert template.fill(name="x") == "begin x\n$@ a@b\n"
    assert template.fill(["more"], name="x") == "begin x\n+ x\n$@ a@b\n"
    assert template.fill(["more", "again"], name="@name@") == "begin @name@\n+ @name@!\n$@ a@b\n"
    assert template.fill_part("again") == "!"
    with pytest.raises(KeyError, match="name"):
        template.fill()


def test_templates_of_the_export_have_no_part_without_a_place() -> None:
    for file in resources.files("dovetail.guests.export").joinpath("templates").iterdir():
        parts = Template("dovetail.guests.export.templates", file.name).parts
        for part in set(parts) - {"", "interrupt", "input", "output", "memory"}:
            assert f"@{part}@" in parts[""], (file.name, part)
