"""This module tests what is compiled and loaded, and when: a kind of operation once, with all that its calls may need. No GPU is
needed, as in ``test_bound_call``."""

from __future__ import annotations

import json
import pathlib
import struct
import types
from typing import Any

import pytest

import rawattn
from rawattn.compile import compiler
from rawattn.errors import ProblemError
from rawattn.operation import Forward
from rawattn.runtime import call_cache, loaded_kernel, record
from tests.host.runtime.test_bound_call import (
    LAUNCHED,
    LOAD,
    calls_kept,
    forget,
    gpu,  # noqa: F401  # a fixture
    keys_kept,
    tensors,
    torch,
)


@pytest.fixture
def compiled(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The keys of what is compiled, in order; but for NVRTC and the driver, kernels are loaded as they are."""
    keys: list[str] = []

    def compile_together(source: Any, others: Any, on_compile: Any = None) -> Any:
        if source.key not in keys:
            keys.extend(dict.fromkeys(each.key for each in (source, *others) if each.key not in keys))
        return types.SimpleNamespace(cubin=b"")

    monkeypatch.setattr(loaded_kernel, "load", LOAD)
    monkeypatch.setattr(loaded_kernel, "_kernels", {})
    monkeypatch.setattr(compiler, "compile_together", compile_together)
    monkeypatch.setattr(loaded_kernel, "LoadedFunction", lambda *_: None)
    return keys


def test_a_new_length_compiles_nothing(compiled: list[str]) -> None:
    """And loads nothing where it is nearly the same."""
    call, kernels = tensors(), loaded_kernel._kernels
    rawattn.attention(**call)
    first = [*compiled]
    assert first and len(kernels) == 1
    for length in range(81, 97):
        rawattn.attention(call["q"], *[torch.randn(2, length, 4, 64).bfloat16()] * 2)
    assert len(kernels) == 1 and len(LAUNCHED) == 17
    for batch, q_len, kv_len, heads in ((1, 65, 800, 2), (3, 3000, 3000, 8), (1, 70, 9, 16)):
        _attend(batch, q_len, kv_len, heads)
    assert compiled == first and {key for key, _ in kernels} <= set(first)


def _attend(batch: int, q_len: int, kv_len: int, heads: int) -> None:
    q, k = torch.randn(batch, q_len, heads, 64).bfloat16(), torch.randn(batch, kv_len, 2, 64).bfloat16()
    rawattn.attention(q, k, k)


def test_few_tiles_are_a_kind_of_their_own(compiled: list[str]) -> None:
    """All that their lengths need is compiled with the first, in parts of the keys or not."""
    _attend(1, 65, 5000, 2)
    first = [*compiled]
    for q_len, kv_len in ((70, 1024), (129, 40_000), (1000, 2000), (3000, 3000)):
        _attend(1, q_len, kv_len, 2)
    assert compiled == first and len(LAUNCHED) > 5


def test_a_decode_loop_compiles_once(compiled: list[str]) -> None:
    """Few queries are a kind of their own, in which keys may be split; all it needs comes with the first step."""
    first: list[str] = []
    for kv_len in (1, 100, 511, 512, 3000, 100_000):
        q, k = torch.zeros(1, 1, 4, 64).bfloat16(), torch.zeros(1, 1, 1, 64).bfloat16().expand(1, kv_len, 2, 64)
        rawattn.attention(q, k.contiguous(), k.contiguous())
        first = first or [*compiled]
    assert compiled == first and {key for key, _ in loaded_kernel._kernels} <= set(first) and len(LAUNCHED) > 6


def test_new_offsets_make_nothing_new(compiled: list[str]) -> None:
    """As in a step of a decode loop, or of a ring: no kernel, no family; the launch has the new positions."""
    given = {name: torch.randn(1, 1 if name == "q" else 80, 4, 64).bfloat16() for name in "qkv"}
    rawattn.attention(**given, causal=True, q_offset=5000)
    compiles, at = len(compiled), []
    for q_offset, kv_offset in ((5001, None), (5117, 0), (5002, 0)):
        rawattn.attention(**given, causal=True, q_offset=q_offset, kv_offset=kv_offset)
        (family,) = keys_kept("family")
        call = call_cache._calls[family]
        layout = call.plan.kernels[0].layout
        at += [struct.unpack_from("i", LAUNCHED[-1][0], layout.offsets[name])[0] for name in ("q_offset", "kv_offset")]
        assert call.op.spec.offsets == (5000, 0)
    assert at == [5001, 0, 5117, 0, 5002, 0] and len(compiled) == compiles and len(keys_kept("torch")) == 1
    rawattn.attention(**given, causal=True, q_offset=6000)
    assert len(keys_kept("family")) == 2 and len(compiled) == compiles
    for wrong in (True, -1, 5000.0, torch.tensor(5000), 1 << 30):
        with pytest.raises(ProblemError, match=r"q_offset is .*it must be"):
            rawattn.attention(**given, causal=True, q_offset=wrong)


def test_another_kind_compiles(compiled: list[str]) -> None:
    rawattn.attention(**tensors())
    for options in ({"causal": True}, {"softcap": 3.0}, {"return_lse": True}, {"scale": -1.0}, {"constant_time": True}):
        count = len(compiled)
        rawattn.attention(**tensors(), **options)
        assert len(compiled) > count, options


def test_log_and_warm_up(compiled: list[str], tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each new operation is written once, and a process that has read them compiles nothing."""
    log = tmp_path / "operations.jsonl"
    monkeypatch.setattr(record, "_logged", set())
    monkeypatch.setenv("RAWATTN_LOG", str(log))
    packed, starts = torch.randn(80, 4, 64).bfloat16(), torch.tensor([0, 30, 80], dtype=torch.int32)

    def calls() -> None:
        for _ in range(2):
            rawattn.attention(**tensors())
            rawattn.attention(**tensors(), window=(3, 0), causal=True)
            rawattn.attention_varlen(packed, packed, packed, starts, starts, softcap=2.0)
            rawattn.plan(**tensors(), return_lse=True)

    calls()
    lines = log.read_text().splitlines()
    assert len(lines) == 4 == len(set(lines))
    operations = [Forward.from_json(json.loads(line)) for line in lines]
    assert operations == [call_cache._calls[key].op for key in keys_kept("torch")]
    forget()
    calls()
    assert log.read_text().splitlines() == lines
    monkeypatch.delenv("RAWATTN_LOG")

    for given in (log, str(log), operations, iter(operations)):
        forget()
        compiled.clear(), loaded_kernel._kernels.clear()
        assert rawattn.warm_up(given) == 4
        warm, loaded = [*compiled], {*loaded_kernel._kernels}
        calls()
        for length in (65, 3000):
            rawattn.attention(**tensors(length))
        other = torch.zeros(1, 512, 8, 64, dtype=torch.bfloat16)  # which gets another configuration
        rawattn.attention(other, other, other)
        assert len({call.plan.config for call in calls_kept() if call.op.kind == operations[0].kind}) > 1
        assert compiled == warm and {*loaded_kernel._kernels} == loaded, "all that a kind may get is loaded"

    elsewhere = tmp_path / "elsewhere.jsonl"
    with pytest.raises(ProblemError, match=r"operations has None; it must have operations such as rawattn\.Forward"):
        rawattn.warm_up(None)
    monkeypatch.setenv("RAWATTN_LOG", str(elsewhere))
    forget()
    rawattn.attention(**tensors())
    assert elsewhere.read_text().splitlines() == lines[:1]
    assert log.read_text().splitlines() == lines
