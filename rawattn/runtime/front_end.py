"""Front ends of libraries, which are above all that computes. They are imported here alone, once their library is loaded."""

from __future__ import annotations

import sys
from typing import Any

operators: Any = None  # torch/operators.py and torch/caches.py, from the first call on where torch is loaded
caches: Any = None


def load_torch() -> bool:
    """Imports the operators once torch is loaded, and tells whether they are there."""
    global operators, caches
    if operators is None and sys.modules.get("torch") is not None:
        from ..torch import caches, operators
    return operators is not None


# Dynamo calls it while it traces, so that the import is done when it reads the modules and guards on them.
load_torch._dynamo_marked_constant = True  # type: ignore[attr-defined]
