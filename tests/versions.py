"""Tests of what an older torch lacks are skipped there; docs/torch.md has the version beside the feature."""

from __future__ import annotations

import importlib.metadata
import re

import pytest


def since(*version: int) -> pytest.MarkDecorator:
    """Makes the mark that skips a test below a version of torch."""
    try:
        installed = importlib.metadata.version("torch")
    except importlib.metadata.PackageNotFoundError:
        installed = ""
    below = tuple(map(int, re.findall(r"\d+", installed)[:2])) < version
    return pytest.mark.skipif(below, reason=f"needs torch {'.'.join(map(str, version))}, as docs/torch.md says")
