"""Sentences of the pages that are hard to read, found by their form.

    python scripts/english.py             # a table: hard sentences of each page
    python scripts/english.py --where     # also each sentence, with the form that was found
    python scripts/english.py --hold      # ends with 1 where a page has more of them than it may

Each form has a plain one: "What stands there is copied" is "The contents are copied"; "the layer it is the bias of" is
"its layer"; ", for it is late" is "because it is late". Code, headings and what commands print are not read.
"""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path

from markdown_it import MarkdownIt

ROOT = Path(__file__).resolve().parents[1]
FORMS = {
    "a clause is the subject": r"^(?:What|Whoever|Who|Whom|Whose|Of|Those)\b(?!.*\?$)",
    "a clause is the object": r"(?:^|[,;:] )what (?:\w+ ){1,8}(?:is|are|has|have|stays?|comes?|goes)\b(?!.*\?$)",
    "a preposition ends a clause": r"\b(?:of|with|from)(?=[.;:,])",
    "'for' means because": r"[,;] for (?:it|they|there|these|those|this|that|then|nothing|none|its|only|what)\b",
    "'behind' means after": r"\bbehind (?:it|them|this|that|each other|one another|the other|the last|the layer)\b",
    "'which' has its noun before 'of'": r"\b(?:none|any|all|each|both|some|one|\w+s?) of (?:which|whom)\b",
    "'not any more'": r"\b[Nn]o(?:thing|body)? .*\bany more\b",
    "'without' ends a clause": r"\b(?:do|does|did|can|could) without\b",
    "'of one's own' for a noun's property": r"\bof one's own\b",
    "a pronoun stands for a part of the program": r"\b(?:whoever|somebody|who (?:needs|reads|wants|asks|computes))\b",
    "an idiom": r"\b(?:gone on with|not mind|mend|found out|in turns|as ever|did away|letter by letter)\b",
}
"""Form -> how it is found. They are those of sentences that readers stumbled over; none is found without errors."""
PLAIN = (
    "README.md",
    "docs/index.md",
    "docs/tour.md",
    "docs/export.md",
    "docs/own_operators.md",
    "docs/quantisation.md",
)
"""What people read first: there is no such sentence."""
LONGEST = 30
"""Words of a sentence on these pages."""
MOST = 55
"""Sentences with such a form on all other pages together: as many as there are; one in 500 is the aim."""


def sentences(page: Path) -> Iterator[tuple[int, str]]:
    """Line and text of each sentence in a page's paragraphs, list items and table cells; code in it is `X`."""
    tokens = MarkdownIt("commonmark").enable("table").parse(page.read_text(encoding="utf-8"))
    line = 1
    for before, token in pairwise(tokens):
        line = token.map[0] + 1 if token.map else line
        if token.type != "inline" or before.type in ("heading_open", "th_open"):
            continue
        parts = [_TEXT.get(child.type, child.content) for child in token.children or ()]
        for sentence in re.split(r"(?<=[.!?:]) +(?=[A-Z(\d])", " ".join("".join(parts).split())):
            if len(sentence.split()) > 2:
                yield line, sentence


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


def pages() -> list[Path]:
    """All pages, those that people read first before the others."""
    first = [ROOT / name for name in PLAIN]
    return first + [page for page in sorted((ROOT / "docs").rglob("*.md")) if page not in first]


def excess() -> list[str]:
    """What is too much: each hard sentence of a page that is read first, or the sum on the other pages."""
    first = [ROOT / name for name in PLAIN]
    over = [each for page in first for each in hard(page, LONGEST)]
    count = sum(len(list(hard(page))) for page in pages() if page not in first)
    if count > MOST:
        over.append(f"{count} hard sentences on the other pages, at most {MOST}: --where shows them")
    return over


def main() -> int:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--hold", action="store_true", help="end with 1 where there are too many")
    parser.add_argument("--where", action="store_true", help="print each sentence")
    options = parser.parse_args()
    for page in pages():
        found, of = list(hard(page, LONGEST if str(page.relative_to(ROOT)) in PLAIN else None)), list(sentences(page))
        print(f"{page.relative_to(ROOT)!s:32} {len(found):4} of {len(of):5} sentences")
        if options.where:
            print("\n".join(found))
    over = excess()
    print("\n".join(over))
    return int(options.hold and bool(over))


if __name__ == "__main__":
    sys.exit(main())
