"""The watchdog (tests/watchdog) on a GPU, in processes of their own: kernels that end lose the device's context."""

from __future__ import annotations

import subprocess
import sys

import pytest

pytestmark = pytest.mark.gpu
pytest.importorskip("torch")

SCRIPT = """
import dataclasses, torch, rawattn
from rawattn.kernel import render
from tests import watchdog

watchdog.start(0.5)
made, (path, old, new) = render.Source, {fault!r}

def broken(**fields):
    source = made(**fields)
    headers = dict(source.headers)
    if path in headers:
        assert headers[path].count(old) == 1
        headers[path] = headers[path].replace(old, new)
    return dataclasses.replace(source, headers=tuple(headers.items()))

render.Source = broken
q, k, v = torch.randn(3, 2, 500, 2, 64, device="cuda").bfloat16().unbind()
try:
    o, lse = rawattn.attention(q, k, v, causal=True, return_lse=True, kernel="attn_fwd")
    found = rawattn.attention_backward(o, q, k, v, o, lse, causal=True, kernel="attn_bwd")
    torch.cuda.synchronize()
    wanted = rawattn.attention_backward(o, q, k, v, o, lse, causal=True, kernel="attn_bwd_simt")
    assert all(torch.allclose(x.float(), y.float(), rtol=0.05, atol=0.05) for x, y in zip(found, wanted))
    print("it ended")
except Exception as error:
    assert watchdog.LOST.search(str(error)), error
print(*watchdog.page().told(), sep="\\n")
"""
FAULTS = {
    "none": (("", "", ""), ("it ended",)),
    "no bytes are announced": (
        ("variant/kv/tma.cuh", "full.arrive_expect(Tile::bytes);", "if (index > 0) full.arrive_expect(Tile::bytes);"),
        ("attn_fwd.cu: block 0, warp", "of k_full"),
    ),
    "the wrong turn": (
        ("variant/dq/clear_turns.cuh", "= first;", "= first + 5;"),
        ("attn_bwd.cu: block", "waits for its turn at place"),
    ),
}


@pytest.mark.parametrize(("fault", "wanted"), FAULTS.values(), ids=FAULTS)
def test_who_waits(fault: tuple[str, str, str], wanted: tuple[str, ...]) -> None:
    ran = subprocess.run([sys.executable, "-c", SCRIPT.format(fault=fault)], capture_output=True, text=True, timeout=300)
    assert ran.returncode == 0, ran.stderr
    assert all(each in ran.stdout for each in wanted), ran.stdout
    assert ("waits" in ran.stdout) == bool(fault[0]), ran.stdout
