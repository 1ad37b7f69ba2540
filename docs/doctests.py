"""Makes blocks of code of the lines with ``>>>`` in docstrings, for mkdocstrings, which takes them for quotations."""

from __future__ import annotations

import re
from typing import Any

import griffe

LINES = re.compile(r"(?:^>>> .*\n?(?:^\.\.\. .*\n?)*)+", re.MULTILINE)


class Doctests(griffe.Extension):
    def on_object(self, *, obj: griffe.Object, **_: Any) -> None:
        if obj.docstring is not None:
            obj.docstring.value = LINES.sub(lambda lines: f"```pycon\n{lines[0].rstrip()}\n```\n", obj.docstring.value)
