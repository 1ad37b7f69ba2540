"""A thread that asks for torch's state while another one loads it gets all of it, or nothing."""

from __future__ import annotations

import importlib.util
from typing import Any

import pytest

torch = pytest.importorskip("torch")


def test_what_tells_that_torch_is_known_is_set_last() -> None:
    """``forms_of``, ``mark_written`` and ``check_untraced`` look at these names, and then call what else was set."""
    spec = importlib.util.find_spec("rawattn.array.torch_state")
    assert spec is not None and spec.loader is not None
    state = importlib.util.module_from_spec(spec)  # another one, of a process that has read no tensor
    spec.loader.exec_module(state)
    asked = []

    class Torch:
        def __getattr__(self, name: str) -> Any:
            asked.append(name)
            assert (state.tensor, state.plain_tensors, state.is_dynamo) == ((), (), None), f"torch.{name} is asked for after it"
            return getattr(torch, name)

    state.load(Torch())
    assert len(asked) > 10 and torch.Tensor in state.plain_tensors
