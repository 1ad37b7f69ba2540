"""This module holds what all tools' command lines share."""

from __future__ import annotations

import argparse
import pathlib
import signal


class Formatter(argparse.RawDescriptionHelpFormatter):
    """Shows the text as it is, and of each option the default that says something."""

    def _get_help_string(self, action: argparse.Action) -> str | None:
        said = action.default in (None, False, "", argparse.SUPPRESS) or isinstance(action.default, list)
        return action.help if said else f"{action.help}; default: %(default)s"


def parser(tool: str, text: str | None, default: str = "perf/record/DEVICE", out: bool = True) -> argparse.ArgumentParser:
    """A parser for ``python -m perf.TOOL`` that shows the module's docstring as it is. A polite kill then counts as Ctrl-C, so
    that what was measured is kept."""
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    found = argparse.ArgumentParser(prog=f"python -m perf.{tool}", description=text, formatter_class=Formatter)
    if out:
        found.add_argument("--out", type=pathlib.Path, metavar="FOLDER", help=f"for what is written; by default {default}")
    return found
