"""Integer-only CUDA files, compiled for the host: what they answer is compared with brute force, and no GPU is needed."""

from __future__ import annotations

import ctypes
import os
import pathlib
import shutil

import pytest

from rawattn.testing import option_checks


def needs_compiler() -> None:
    """Skips where there is no C++ compiler; CI must have one."""
    if shutil.which("c++") is None and shutil.which("g++") is None:
        missing = pytest.fail if os.environ.get("CI") else pytest.skip
        missing("needs a C++ compiler for the host: c++ or g++")


def library(text: str, folder: pathlib.Path) -> ctypes.CDLL:
    """``text``, which includes files of ``cuda_src/``, as a shared library in ``folder``."""
    needs_compiler()
    return option_checks.library(text, folder)
