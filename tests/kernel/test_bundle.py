"""A bundle on a GPU, in a process that has torch and cuda-bindings, but neither CuPy nor NVRTC."""

from __future__ import annotations

import os
import pathlib
import subprocess
import sys

import pytest

pytest.importorskip("torch")
pytestmark = pytest.mark.gpu("any")

CALLS = """\
import sys
import torch
if sys.argv[1]:
    sys.modules["cupy"] = None
    import rawattn
    rawattn.load_bundle(sys.argv[1])
import rawattn
torch.manual_seed(0)
q, k, v = torch.randn(3, 2, 300, 8, 64, dtype=torch.float16, device="cuda")
q.requires_grad_()
o = rawattn.attention(q, k, v, causal=True)
o.sum().backward()
few = rawattn.attention(q[:, :1].detach(), k[:, :, :2], v[:, :, :2])
print(*(x.double().abs().sum().item().hex() for x in (o, q.grad, few)))
"""


def run(bundle: str, cache: pathlib.Path, **environment: str) -> list[str]:
    ran = subprocess.run(
        [sys.executable, "-c", CALLS, bundle], env=os.environ | {"RAWATTN_CACHE": str(cache)} | environment,
        capture_output=True, text=True,
    )  # fmt: skip
    assert ran.returncode == 0, ran.stderr
    return ran.stdout.split()


def test_a_bundle_computes_the_same(tmp_path: pathlib.Path) -> None:
    from rawattn import driver

    spec, out, nowhere = tmp_path / "operations.jsonl", tmp_path / "kernels.zip", tmp_path / "nowhere"
    expected = run("", tmp_path / "cache", RAWATTN_LOG=str(spec))
    command = [sys.executable, "-m", "rawattn", "bundle", "--arch", driver.device(0).arch, "--spec", str(spec), "--out", str(out)]
    subprocess.run(command, check=True, env=os.environ | {"RAWATTN_CACHE": str(tmp_path / "cache")})
    assert run(str(out), nowhere) == expected and not nowhere.exists()
