"""Sentences of pages, `--help` and messages that are hard to read, found by their form.

    python scripts/english.py             # counts for each page, then each sentence with the form that was found
    python scripts/english.py --hold      # ends with 1 if there is one

Each form has a plain one: "What stands there is copied" is "The contents are copied"; "the layer it is the bias of" is
"its layer"; ", for it is late" is "because it is late". Code, headings and what commands print are not read.
"""

from __future__ import annotations

import argparse
import ast
import re
import sys
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path

from markdown_it import MarkdownIt

ROOT = Path(__file__).resolve().parents[1]
FORMS = {
    "a clause is the subject": r"^(?:What|Whoever|Who|Whom|Whose|Of|Those)\b(?!.*\?$)",
    "a clause is the object": r"(?:^|[,;:] )what (?:\w+ ){1,8}(?:is|are|has|have|stays?|comes?|goes|reads?)\b(?!.*\?$)",
    "a clause follows a preposition": r"\b(?:than|of|into|on|with|by|for|from) what\b",
    "a preposition ends a clause": r"\b(?:of|with|from|than|for|into|onto)(?=[.;:,])",
    "'for' means because": r"[,;] for (?:it|they|there|these|those|this|that|then|nothing|none|its|only|what)\b",
    "'behind' means after": r"\bbehind (?:it|them|this|that|each other|one another|the other|the last|the layer)\b",
    "'where there is' means if": r"\b[Ww]here (?:there (?:is|are)\b|(?:it is|they are)(?=[,.;:]|$))",
    "'which' has its noun before 'of'": r"\b(?:none|any|all|each|both|some|one|\w+s?) of (?:which|whom)\b",
    "'which' is far from its noun": r"\b(?:between|behind|without|beside|above|below) which\b",
    "'not any more'": r"\b[Nn]o(?:thing|body)? .*\bany more\b",
    "'without' ends a clause": r"\b(?:do|does|did|can|could) without\b",
    "'of its own' for a noun's property": r"\bof one's own\b|\bof (?:a|an|the) \w+ of (?:its|their) own\b",
    "a pronoun stands for a part of the program": r"\b(?:whoever|somebody|who (?:needs|reads|wants|asks|computes))\b",
    "'one' or 'none' stands for a noun": r"\b(?:is|are|stays?|has|have) (?:one|ones|none)(?=[.,;:])",
    "a possessive has no noun": r"\b(?:is|are|be) (?:the |its )?[\w-]+(?:'s|s')(?=[.,:;])",
    "'there' has no place": r"\b(?:that|which|what) (?:is|are) there\b",
    "'so is' in place of 'too'": r"[,;] so (?:is|are|do|does|has|have) (?:the|a|its|those|all)\b",
    "'shall' in a description": r"\bshall\b",
    "an idiom": r"\b(?:gone on with|not mind|mend|found out|in turns|as ever|did away|letter by letter|slips? through"
    r"|flatters?|looks in one|(?:is|are|was) told)\b",
}
"""Form -> how it is found. They are those of sentences that readers stumbled over; none is found without errors."""
LONGEST = 30
"""Words of a sentence."""
LISTS = ("docs/support.md", "docs/reference/options.md")
"""Pages that scripts write from lists of names, whose sentences may be longer."""


def sentences(page: Path) -> Iterator[tuple[int, str]]:
    """Line and text of each sentence in a page's paragraphs, list items and table cells; code in it is `X`."""
    tokens = MarkdownIt("commonmark").enable("table").parse(page.read_text(encoding="utf-8"))
    line = 1
    for before, token in pairwise(tokens):
        line = token.map[0] + 1 if token.map else line
        if token.type != "inline" or before.type in ("heading_open", "th_open"):
            continue
        parts = [_TEXT.get(child.type, child.content) for child in token.children or ()]
        for sentence in SENTENCE.split(" ".join("".join(parts).split())):
            if len(sentence.split()) > 2:
                yield line, sentence


SENTENCE = re.compile(r"(?<=[.!?:]) +(?=[A-Z(\d])")
"""Between two sentences."""
_TEXT = {"code_inline": "X", "softbreak": " ", "html_inline": "", "image": ""}
"""What stands for a part of a paragraph."""


def forms(sentence: str) -> list[str]:
    """The hard forms a sentence has."""
    return [name for name, pattern in FORMS.items() if re.search(pattern, sentence)]


def hard(page: Path, longest: int | None = None) -> Iterator[str]:
    """The hard sentences of a page, with place and form.

    Args:
        page: a Markdown file.
        longest: words a sentence may have; None where that is not asked.
    """
    for line, sentence in sentences(page):
        found = forms(sentence)
        words = len(sentence.split())
        if longest is not None and words > longest:
            found.append(f"{words} words, {longest} are enough")
        if found:
            yield f"{page.relative_to(ROOT)}:{line}: {'; '.join(found)}: {sentence}"


def said(path: Path) -> Iterator[str]:
    """The hard sentences among the help texts, messages and notes of a module, with place and form."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if not isinstance(node, ast.Call):
            continue
        name = node.func.id if isinstance(node.func, ast.Name) else getattr(node.func, "attr", "")
        given = [word.value for word in node.keywords if word.arg in ("help", "hint", "what", "where", "sentence")]
        given += (
            node.args[1:2]
            if name in ("flag", "Note")
            else node.args[:1]
            if name.endswith(("Error", "Constraint"))
            else []
        )
        for text in map(words_of, given):
            for sentence in SENTENCE.split(text):
                if found := forms(sentence):
                    yield f"{path.relative_to(ROOT)}:{node.lineno}: {'; '.join(found)}: {sentence}"


def words_of(node: ast.expr) -> str:
    """The text of an expression; `X` stands for what is computed."""
    if isinstance(node, ast.Constant):
        return str(node.value)
    if isinstance(node, ast.JoinedStr):
        return "".join(map(words_of, node.values))
    if isinstance(node, ast.BinOp):
        return words_of(node.left) + words_of(node.right)
    return "X"


def pages() -> list[Path]:
    """All pages but those of docstrings, which have a test of their own."""
    first = [ROOT / name for name in ("README.md", "CHANGELOG.md", "CONTRIBUTING.md")]
    others = [*sorted((ROOT / "docs").glob("*.md")), *sorted((ROOT / "docs" / "reference").glob("*.md"))]
    return first + [page for page in others if page.name != "modules.md"]


def hard_of(page: Path) -> list[str]:
    """The hard sentences of a page, long ones too unless it is a list."""
    return list(hard(page, None if str(page.relative_to(ROOT)) in LISTS else LONGEST))


def excess() -> list[str]:
    """The hard sentences of all pages, of `--help` and of messages."""
    modules = sorted((ROOT / "dovetail").rglob("*.py"))
    return [each for page in pages() for each in hard_of(page)] + [each for path in modules for each in said(path)]


def main() -> int:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--hold", action="store_true", help="end with 1 if there is one")
    options = parser.parse_args()
    for page in pages():
        print(f"{page.relative_to(ROOT)!s:32} {len(hard_of(page)):4} of {len(list(sentences(page))):5} sentences")
    over = excess()
    print("\n".join(over))
    return int(options.hold and bool(over))


if __name__ == "__main__":
    sys.exit(main())
