"""Front ends of libraries, which are above all that computes. They are imported here alone, once their library is loaded."""

from __future__ import annotations

import sys
from typing import Any

torch: Any = None  # the package rawattn.torch, from the first call on where torch is loaded


def load_torch() -> bool:
    """Imports the front end of torch once torch is loaded, and tells whether it is there."""
    global torch
    if torch is None and sys.modules.get("torch") is not None:
        from .. import torch as front_end

        torch = front_end
    return torch is not None


# Dynamo calls it while it traces, so that the import is done when it reads the modules and guards on them.
load_torch._dynamo_marked_constant = True  # type: ignore[attr-defined]
