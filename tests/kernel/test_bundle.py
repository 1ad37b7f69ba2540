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
import os
import sys
import torch


class Absent:
    \"""Finds nothing where CuPy and NVRTC would be.\"""

    NAMES = ("cupy", "cupyx", "cupy_backends", "cuda.bindings.nvrtc", "nvidia.cuda_nvrtc")
    asked = set()

    def find_spec(self, name, path=None, target=None):
        if any(name == each or name.startswith(each + ".") for each in self.NAMES):
            self.asked.add(name)
            raise ModuleNotFoundError(f"{name} is absent", name=name)


def compilers():
    return {line.split()[-1] for line in open("/proc/self/maps") if "nvrtc" in line}


torch.manual_seed(0)
q, k, v = torch.randn(3, 2, 300, 8, 64, dtype=torch.float16, device="cuda")
before = compilers()  # torch may bring its own
if sys.argv[1]:
    sys.meta_path.insert(0, Absent())
import rawattn
if sys.argv[1]:
    rawattn.load_bundle(sys.argv[1])
    rawattn.warm_up(sys.argv[2])
q.requires_grad_()
o = rawattn.attention(q, k, v, causal=True)
o.sum().backward()
few = rawattn.attention(q[:, :1].detach(), k[:, :, :2], v[:, :, :2])
pages = torch.zeros(2, 8, 64, 2, 64, dtype=torch.float16, device="cuda")
table = torch.tensor([[3, 1, 6, 0], [2, 7, 5, 4]], dtype=torch.int32, device="cuda")
cache = rawattn.KVCache(*pages)
rows = q.detach()
for new, lens in ((200, [200, 200]), (1, [201, 201])):
    step = rawattn.Step(torch.tensor(lens, dtype=torch.int32, device="cuda"), table)
    at = slice(lens[0] - new, lens[0])
    decoded = rawattn.attention_append(rows[:, at], k[:, at, :2], v[:, at, :2], cache, step)
whole = rawattn.attention(rows[:, :201], k[:, :201, :2], v[:, :201, :2], causal=True) if not sys.argv[1] else None
assert whole is None or (whole[:, 200:] - decoded).abs().max() < 4e-3
if sys.argv[1]:
    assert compilers() == before and "cupy" not in sys.modules and "cuda.bindings.nvrtc" not in sys.modules
    assert not os.path.exists(os.environ["RAWATTN_CACHE"])  # what no bundle has makes it, below
    try:
        rawattn.attention(q.detach()[..., :48], k[..., :48], v[..., :48])
        raise SystemExit("a kernel came from elsewhere")
    except rawattn.UnsupportedError as error:
        assert "which is in no loaded bundle" in str(error), error
print(*(x.double().abs().sum().item().hex() for x in (o, q.grad, few, decoded)))
"""


def run(bundle: str, spec: pathlib.Path, cache: pathlib.Path, **environment: str) -> list[str]:
    ran = subprocess.run(
        [sys.executable, "-c", CALLS, bundle, str(spec)], env=os.environ | {"RAWATTN_CACHE": str(cache)} | environment,
        capture_output=True, text=True,
    )  # fmt: skip
    assert ran.returncode == 0, ran.stderr
    return ran.stdout.split()


def test_a_bundle_computes_the_same(tmp_path: pathlib.Path) -> None:
    """Forward, backward, and decoding over a cache: the bits of the run that compiled, and no cache folder."""
    from rawattn.driver.context import device

    spec, out, nowhere = tmp_path / "operations.jsonl", tmp_path / "kernels.zip", tmp_path / "nowhere"
    expected = run("", spec, tmp_path / "cache", RAWATTN_LOG=str(spec))
    command = [sys.executable, "-m", "rawattn", "bundle", "--arch", device(0).arch, "--spec", str(spec), "--out", str(out)]
    subprocess.run(command, check=True, env=os.environ | {"RAWATTN_CACHE": str(tmp_path / "cache")})
    assert run(str(out), spec, nowhere) == expected
