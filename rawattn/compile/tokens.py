"""The tokens of CUDA C++, to tell whether two texts are the same code."""

from __future__ import annotations

import functools
import re

_TOKEN = re.compile(
    r"""
      (?P<comment> //(?:\\\n|[^\n])* | /\*.*?\*/ )
    | (?P<end>     \n )
    | (?P<blank>   \\\n | \s )
    | \.?\d(?:[eEpP][+-] | '\w | [\w.])*                 # a number
    | \w*R"(?P<mark>[^()\s\\"]*)\(.*?\)(?P=mark)"        # a raw string
    | \w*"(?:\\.|[^"\\\n])*" | \w*'(?:\\.|[^'\\\n])*'
    | \w+
    | <<= | >>= | <=> | \.\.\. | ->\* | ::|\+\+|--|->|<<|>>|<=|>=|==|!=|&&|\|\||[-+*/%&|^]=|\.\*|\#\#
    | .
    """,
    re.DOTALL | re.VERBOSE,
)


@functools.lru_cache(maxsize=256)
def code(text: str) -> str:
    """The tokens of a text, a line each: without comments, and without white space but for the ends of directives.

    Texts with equal tokens compile to equal machine code, as long as they do not ask for ``__LINE__``.
    """
    tokens: list[str] = []
    at_line_start, in_directive = True, False
    for match in _TOKEN.finditer(text):
        kind, token = match.lastgroup, match[0]
        if kind == "end":
            if in_directive:
                tokens.append("")
            at_line_start, in_directive = True, False
        elif kind not in ("comment", "blank"):
            in_directive |= at_line_start and token == "#"
            at_line_start = False
            tokens.append(token)
    return "\n".join(tokens)
