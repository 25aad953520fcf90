"""Text templates of packages: C, build files and the like with words to fill in.

`@word@` stands for a word. A line `@@part` begins a part, which stands for `@part@` where it is shown, and is left out
otherwise; it has no line end at its end.
"""

from __future__ import annotations

import re
from collections.abc import Collection
from functools import cached_property
from importlib import resources

from dovetail.records import Record


class Template(Record, dict=True):
    """A template in a package."""

    package: str
    name: str
    """Name of the file in the package."""

    @cached_property
    def parts(self) -> dict[str, str]:
        """Text by part; the main text has the empty name."""
        text = resources.files(self.package).joinpath(self.name).read_text("utf-8")
        main, *parts = re.split(r"\n@@(\w+)\n", text.removesuffix("\n"))
        return {"": main, **dict(zip(parts[::2], parts[1::2], strict=True))}

    def fill(self, shown: Collection[str] = (), **words: object) -> str:
        """The whole text with words and the shown parts filled in; a KeyError is a word without a meaning."""
        return self.fill_part("", shown, **words) + "\n"

    def fill_part(self, part: str, shown: Collection[str] = (), **words: object) -> str:
        """As `fill`, of one part."""

        def meaning(match: re.Match[str]) -> str:
            word = match[1]
            if word in self.parts:
                return self.fill_part(word, shown, **words) if word in shown else ""
            return str(words[word])

        return re.sub(r"@(\w+)@", meaning, self.parts[part])
