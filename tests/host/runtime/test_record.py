"""This module tests the log of operations, RAWATTN_LOG, and what reads it."""

from __future__ import annotations

import json
import pathlib

import pytest

import rawattn
from rawattn.errors import ProblemError
from rawattn.operation import Forward
from rawattn.runtime import record
from tests.host.runtime.test_bound_call import (
    gpu,  # noqa: F401  # a fixture
    keys_kept,
    tensors,
    torch,
)


def test_the_log_has_every_length_and_offset(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also of operations that a plan of the same family serves."""
    log, queries = tmp_path / "operations.jsonl", torch.randn(1, 200, 4, 64).bfloat16()
    monkeypatch.setattr(record, "_logged", set())
    monkeypatch.setenv("RAWATTN_LOG", str(log))
    once = [(1, 1025, None), (1, 1026, None), (1, 1100, None), (1, 1025, 1030), (1, 1025, 1031)]
    once += [(160, 1025, None), (159, 1025, None), (159, 1026, None), (160, 1026, None), (161, 1025, None)]
    for q_len, kv_len, q_offset in (*once, *once[::-1]):
        k = torch.randn(1, kv_len, 4, 64).bfloat16()
        rawattn.attention(queries[:, :q_len], k, k, causal=True, q_offset=q_offset)
    found = [Forward.from_json(json.loads(line)) for line in log.read_text().splitlines()]
    assert [(op.q_len, op.kv_len, op.spec.q_offset) for op in found] == once and len(keys_kept("family")) == 4


def test_a_log_that_cannot_be_written(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing goes on without it: what was not written is not taken for written."""
    monkeypatch.setattr(record, "_logged", set())
    monkeypatch.setenv("RAWATTN_LOG", str(tmp_path))
    for _ in range(2):
        with pytest.raises(ProblemError, match=r"RAWATTN_LOG is .* can be written .*directory.*; name a file that can be"):
            rawattn.attention(**tensors())
    monkeypatch.delenv("RAWATTN_LOG")
    rawattn.attention(**tensors())


def test_a_log_whose_last_line_has_no_newline(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    log = tmp_path / "operations.jsonl"
    log.write_text("{}")
    monkeypatch.setattr(record, "_logged", set())
    monkeypatch.setenv("RAWATTN_LOG", str(log))
    for causal in (False, True):
        rawattn.attention(**tensors(), causal=causal)
    first, *others = log.read_text().splitlines()
    assert first == "{}" and [Forward.from_json(json.loads(line)).mask.cuda_type for line in others] == ["Full", "Causal"]


@pytest.mark.skipif(not pathlib.Path("/dev/full").exists(), reason="has no device without an end")
def test_a_log_without_an_end(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of what is there one byte is read: all of /dev/full, which gives zeros, fits into no memory."""
    monkeypatch.setattr(record, "_logged", set())
    monkeypatch.setenv("RAWATTN_LOG", "/dev/full")
    with pytest.raises(ProblemError, match=r"RAWATTN_LOG is '/dev/full', where no operation can be written"):
        rawattn.attention(**tensors(), causal=True)


@pytest.mark.parametrize(
    "line",
    ["", "{", "[]", "{}", '{"element": "bf17"}', '{"element": "bf16", "spec": {"mask": {"class": "os:system"}}, "layout": []}'],
)
def test_a_line_that_is_no_operation(line: str, tmp_path: pathlib.Path) -> None:
    (tmp_path / "log").write_text(f"{line}\n")
    with pytest.raises(ProblemError, match="operations has the line"):
        rawattn.warm_up(tmp_path / "log")
    (tmp_path / "log").write_bytes(b"\xff\xfe")
    with pytest.raises(ProblemError, match=r"operations is '.*log', which is no text .*; name a file of RAWATTN_LOG"):
        rawattn.warm_up(tmp_path / "log")
