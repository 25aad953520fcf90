"""Files from outside: values, lines and messages of JSON, TOML and YAML text."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any, Literal

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec import Meta

from dovetail.documents import MOST_BYTES, Document, parse_document, path_text, read_document
from dovetail.documents.lines import DEEPEST, TextFault, TextForm, ValuePath, line_of, parse_text
from dovetail.errors import DovetailError, PlanError


class RowRule(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    layer: str
    rows: Annotated[int, Meta(ge=1, le=1024)] = 1
    order: Literal["rows", "channels"] = "rows"

    def __post_init__(self) -> None:
        if self.order == "channels" and self.rows > 1:
            raise ValueError("channels first has one row")


Name = Annotated[str, Meta(max_length=3, description="a name of at most three letters")]


class RowRules(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    rules: Annotated[tuple[RowRule, ...], Meta(max_length=3)] = ()
    groups: dict[Name, dict[str, RowRule]] = {}
    box: tuple[int, int] = (0, 1)
    what: int | list[str] | RowRule | None = None


def read(text: str, form: TextForm, first_line: int = 0) -> Document[RowRules]:
    return parse_document(text, f"f.{form}", form, RowRules, first_line=first_line, error=PlanError, hint="see there")


MESSAGES = [
    ("yaml", "rules:\n- layer: a\n\n- layer: b\n  rows: 0\n", "f.yaml:5: rules[1].rows: must be a whole number from 1"),
    ("yaml", "rules: [{layer: a, rows: 'x'}]", "rules[0].rows: must be a whole number from 1 to 1024, not 'x'"),
    ("yaml", "what: 1.5", "what: must be a whole number, a list (each a text) or a mapping of layer, rows, order"),
    ("yaml", "what: " + "9" * 300 + "\nbox: [1, b]", "f.yaml:2: box[1]: must be a whole number, not 'b'"),
    ("yaml", "box: [" + "9" * 300 + "]", f"box: must be a list of 2 (each a whole number), not [{'9' * 60}... (300 ch"),
    ("yaml", "a: b\na: c\n", "f.yaml:2: 'a' stands here twice (clashes with f.yaml:1)"),
    ("yaml", "[x]: 1", "f.yaml:1: the name of an entry must be a text"),
    ("yaml", "- 1", "f.yaml: this must be a mapping of rules, groups, box, what, not [1]"),
    ("yaml", "box: &x [1, 2]\nrules: *x", "f.yaml:1: an alias or anchor; write the value out instead"),
    ("yaml", "\nbox: !!str 1", "f.yaml:2: the tag tag:yaml.org,2002:str; leave it out"),
    ("yaml", "box: a: b", "f.yaml:1: this is not YAML: mapping values are not allowed"),
    ("yaml", "box: [1, 2]\n---\nbox: [2, 3]", "f.yaml:2: a second YAML document begins here"),
    ("yaml", "rules: [{layer: a}, {layer: a}, {layer: a}, {layer: a}]", "must be a list of at most 3 members (each"),
    ("json", '{"groups":{"a":{},\n"bc":{\n"x y":{"layer":"b",\n"order":"c"}}}}', "f.json:4: groups.bc.'x y'.order: "),
    ("json", '{"groups":{"a":{},\n"bcde":{}}}', "f.json:2: groups.bcde: the name must be a name of at most"),
    ("json", '{"rules":[],\n\n"rules":[]}', "f.json:3: 'rules' stands here twice (clashes with f.json:1)"),
    ("json", '{"rules":[],\n\n"box" 2}', "f.json:3: this is not JSON: Expecting ':' delimiter (column 7)"),
    ("json", '{"what":NaN}', "f.json: this is not JSON: NaN is not a number"),
    ("json", '{"what":' + "9" * 5000 + "}", "f.json: this is not JSON: Exceeds the limit (4300 digits)"),
    ("json", "null", "f.json: this must be a mapping of rules, groups, box, what, not nothing"),
    ("toml", '[[rules]]\nlayer = "x"\n[[rules]]\nlayer = "y"\nrosw = 2', "f.toml:5: rules[1].rosw: there is no "),
    ("toml", '[[rules]]\nlayer = "x"\nrows = 2\norder = "channels"', "f.toml:1: rules[0]: channels first has one row"),
    ("toml", "[[rules]]\nrows = 2", "f.toml:1: rules[0]: 'layer' is missing"),
    ("toml", "[groups.a.'b c']\nrows = 3", "f.toml:1: groups.a.'b c': 'layer' is missing"),
    ("toml", "groups.a.b.rows = 3", "f.toml:1: groups.a.b: 'layer' is missing"),
    ("toml", "box = [1,\n2, # and\n3]", "f.toml:1: box: must be a list of 2 (each a whole number), not [1, 2, 3]"),
    ("toml", 'rules = [\n{layer = "x"}, # first\n\n{layer = "y", rows = 1.5}]', "f.toml:4: rules[1].rows: must be"),
    ("toml", "box = true", "f.toml:1: box: must be a list of 2 (each a whole number), not true"),
    ("toml", "what = 1979-05-27", "f.toml:1: what: must be a whole number, a list"),
    ("toml", "box = [1, 2]\nbox = [1, 2]", "f.toml:2: this is not TOML: Cannot overwrite a value"),
    ("toml", "\nbox = [", "f.toml:2: this is not TOML: "),
]  # fmt: skip


@pytest.mark.parametrize(("form", "text", "message"), MESSAGES)
def test_message_names_line_path_and_value(form: TextForm, text: str, message: str) -> None:
    with pytest.raises(PlanError) as caught:
        read(text, form)
    assert message in str(caught.value)
    assert caught.value.hint


def test_unknown_entry_has_the_names_as_hint() -> None:
    with pytest.raises(PlanError, match="perhaps 'box'") as caught:
        read("bxo: [1, 2]", "yaml")
    assert caught.value.hint == "use rules, groups, box, what"


@pytest.mark.parametrize("opening", ["[", '{"a":', "{a: ", "[[", "a=[", "a={a=", "- "])
@pytest.mark.parametrize("form", ["json", "toml", "yaml"])
@pytest.mark.parametrize("times", [DEEPEST, 2_000, 100_000])
def test_deep_nesting_is_refused(form: TextForm, opening: str, times: int) -> None:
    with pytest.raises(PlanError):
        read(opening * times, form)


def test_half_a_surrogate_pair_is_refused() -> None:
    with pytest.raises(DovetailError, match=r"f\.json.*half of a surrogate pair"):
        parse_document('{"rows": "\\ud800"}', "f.json", "json", dict[str, int], hint="write the whole pair")


def test_depth_is_counted() -> None:
    def nested(levels: int) -> str:
        return "[" * levels + "]" * levels

    for form in ("json", "yaml"):
        parse_text(nested(DEEPEST), form)
        with pytest.raises(TextFault, match=f"more than {DEEPEST} levels"):
            parse_text(nested(DEEPEST + 1), form)


def test_schema_is_looked_at_first() -> None:
    text = '{"new": 1,\n"schema": 2}'
    with pytest.raises(DovetailError) as caught:
        parse_document(text, "f.json", "json", RowRules, schema=1, hint="make it again")
    assert str(caught.value) == "f.json:2: schema: is 2, expected 1\n  what to do: make it again"


def test_lines_of_a_part_of_a_file() -> None:
    document = read('{"what":\n3}', "json", first_line=10)
    assert document.place(("what",)) == "f.json:10"
    assert document.place() == "f.json:10"
    with pytest.raises(PlanError, match=r"f\.json:11: what\[0\]: must be a text, not 3"):
        read('{"what":\n[\n3]}'.replace("\n[", "["), "json", first_line=10)


def test_error_of_a_value_that_was_read() -> None:
    document = read("box: [1, 2]\nwhat: [b]\n", "yaml")
    error = document.wrong("this is too much", ("what", 0), other=("box", 1))
    assert str(error) == "f.yaml:2: what[0]: this is too much (clashes with f.yaml:1)\n  what to do: see there"
    assert isinstance(error, PlanError)
    assert document.wrong("x", hint="y").hint == "y"


def test_read_document(tmp_path: Path) -> None:
    path = tmp_path / "rules.toml"
    path.write_text("box = [3, 4]\n")
    assert read_document(path, "toml", RowRules, hint="x").value == RowRules(box=(3, 4))
    path.write_bytes(b"box = [3, 4]\n# \xff")
    with pytest.raises(DovetailError, match=r"rules\.toml:2: the rules is not text in UTF-8"):
        read_document(path, "toml", RowRules, hint="x", what="the rules")
    path.write_bytes(b" " * (MOST_BYTES + 1))
    with pytest.raises(DovetailError, match="the file is larger than 1,048,576 bytes"):
        read_document(path, "toml", RowRules, hint="x")
    with pytest.raises(DovetailError, match="the file cannot be read: No such file"):
        read_document(tmp_path / "none", "toml", RowRules, hint="x")
    with pytest.raises(DovetailError, match="the file cannot be read: "):
        read_document(tmp_path, "toml", RowRules, hint="x")


NAMES = st.text(
    st.characters(codec="utf-8", exclude_characters="\r\x85\u2028\u2029", exclude_categories=["Cc"]), max_size=5
)
SCALARS = st.one_of(
    st.integers(), st.booleans(), NAMES, st.sampled_from(["#", '"', "'", "a.b", "[x]", "null", "07:00", "é\n"])
)


def values(scalars: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    return st.recursive(scalars, lambda inner: st.lists(inner, max_size=4) | st.dictionaries(NAMES, inner, max_size=4))


def paths(value: Any, path: ValuePath = ()) -> Iterator[ValuePath]:
    yield path
    for key, inner in value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ():
        yield from paths(inner, (*path, key))


class LineWriter:
    """Writes values with line ends in places the dice choose, and notes where each value or its name is."""

    def __init__(self, dice: random.Random, separator: str) -> None:
        self.dice, self.separator = dice, separator
        self.text = ""
        self.lines: dict[ValuePath, int] = {}

    def gap(self) -> None:
        comment = "  # a [comment] = {\n" if self.separator == "=" else "\n"
        self.text += self.dice.choice(["", " ", "\n", " \n\n  ", comment])

    def note(self, path: ValuePath) -> None:
        self.lines[path] = self.text.count("\n") + 1

    def scalar(self, value: Any) -> str:
        text = json.dumps(value, ensure_ascii=self.dice.random() < 0.5 and self.separator == ":")
        text = text.replace("\x7f", "\\u007f")
        if self.separator == "=" and isinstance(value, str) and value and self.dice.random() < 0.4:
            return f'"""{text[1:-1]}"""' if self.dice.random() < 0.5 or "'" in value or "\n" in value else f"'{value}'"
        return text

    def name(self, name: str) -> str:
        if self.separator == "=" and name.isascii() and name.isalnum() and self.dice.random() < 0.7:
            return name
        return json.dumps(name, ensure_ascii=False).replace("\x7f", "\\u007f")

    def value(self, value: Any, path: ValuePath, named: bool = False) -> None:
        """A value as in JSON; within braces TOML has no line ends."""
        if not named:
            self.note(path)
        if isinstance(value, list):
            self.text += "["
            for number, inner in enumerate(value):
                self.gap()
                self.value(inner, (*path, number))
                self.gap()
                self.text += "," if number < len(value) - 1 else ""
            self.text += "]"
        elif isinstance(value, dict):
            gap = self.gap if self.separator == ":" else lambda: None
            self.text += "{"
            for number, (name, inner) in enumerate(value.items()):
                gap()
                self.note((*path, name))
                self.text += f"{self.name(name)} {self.separator} "
                self.value(inner, (*path, name), named=True)
                gap()
                self.text += "," if number < len(value) - 1 else ""
            self.text += "}"
        else:
            self.text += self.scalar(value)

    def toml(self, table: dict[str, Any], path: ValuePath = (), header: str = "") -> None:
        """A table: plain entries, then tables and arrays of tables below it."""
        below = {name: inner for name, inner in table.items() if self.is_table(inner) and self.dice.random() < 0.8}
        for name, inner in table.items():
            if name not in below:
                self.note((*path, name))
                self.text += f"{self.name(name)} {self.separator} "
                self.value(inner, (*path, name), named=True)
                self.text += self.dice.choice(["\n", " # comment ]\n"])
        for name, inner in below.items():
            full = f"{header}.{self.name(name)}".removeprefix(".")
            for number, one in enumerate(inner if isinstance(inner, list) else [inner]):
                here = (*path, name, number) if isinstance(inner, list) else (*path, name)
                self.note(here)
                self.text += f"[[{full}]]\n" if isinstance(inner, list) else f"[ {full} ]\n"
                self.toml(one, here, full)
            self.lines.setdefault(
                (*path, name), min(self.lines[here] for here in self.lines if here[: len(path) + 1] == (*path, name))
            )

    @staticmethod
    def is_table(value: Any) -> bool:
        tables = value if isinstance(value, list) else [value]
        return bool(tables) and all(isinstance(one, dict) for one in tables)


@settings(max_examples=60, deadline=None)
@given(
    values(SCALARS | st.none() | st.floats(allow_nan=False, allow_infinity=False)), st.randoms(use_true_random=False)
)
def test_values_and_lines_of_json(value: Any, dice: random.Random) -> None:
    writer = LineWriter(dice, ":")
    writer.value(value, ())
    assert parse_text(writer.text, "json") == value
    for path in paths(value):
        assert line_of(writer.text, "json", path) == (writer.lines[path] if path else 0)


@settings(max_examples=60, deadline=None)
@given(
    st.dictionaries(NAMES, values(SCALARS | st.floats(allow_nan=False, allow_infinity=False)), max_size=5),
    st.randoms(use_true_random=False),
)
def test_values_and_lines_of_toml(value: Any, dice: random.Random) -> None:
    writer = LineWriter(dice, "=")
    writer.toml(value)
    assert parse_text(writer.text, "toml") == value, writer.text
    for path in paths(value):
        assert line_of(writer.text, "toml", path) == (writer.lines[path] if path else 0), (path, writer.text)


@settings(max_examples=60, deadline=None)
@given(values(SCALARS | st.none()), st.integers(0, 3))
def test_values_and_lines_of_yaml(value: Any, indent: int) -> None:
    text = json.dumps(value, indent=indent, ensure_ascii=False)
    assert parse_text(text, "yaml") == ({} if text == "" else value)
    for path in paths(value):
        assert line_of(text, "yaml", path) == line_of(text, "json", path)


@settings(max_examples=100, deadline=None)
@given(
    st.sampled_from(["json", "toml", "yaml"]), st.text(max_size=60) | st.text("[]{}\",:=.#&*!-\n ab1'\\", max_size=40)
)
def test_any_text_is_a_document_or_an_error(form: TextForm, text: str) -> None:
    try:
        value = parse_text(text, form)
    except TextFault:
        return
    for path in paths(value):
        assert 0 <= line_of(text, form, path) <= len(text.splitlines()) + 1


FIELDS = st.sampled_from(["rules", "groups", "box", "what", "layer", "rows", "order", "x"])


@settings(max_examples=100, deadline=None)
@given(
    st.recursive(
        SCALARS | st.none(), lambda inner: st.lists(inner, max_size=4) | st.dictionaries(FIELDS, inner, max_size=5)
    )
)
def test_any_values_are_a_record_or_an_error_with_a_line(value: Any) -> None:
    text = json.dumps(value, indent=1)
    try:
        read(text, "json")
    except PlanError as error:
        place, _, what = str(error).partition(": ")
        assert place == "f.json" or 1 <= int(place.removeprefix("f.json:")) <= text.count("\n") + 1
        assert what
        assert len(str(error)) < 700


def test_path_text() -> None:
    assert path_text(("layers", 3, "rows", "a b", "")) == "layers[3].rows.'a b'.''"
