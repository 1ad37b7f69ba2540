"""The wheel: built, looked into, installed into a folder, and used from another."""

from __future__ import annotations

import os
import pathlib
import re
import subprocess
import sys
import zipfile

import pytest

ROOT = pathlib.Path(__file__).resolve().parents[2]
PIP = [sys.executable, "-m", "pip", "--disable-pip-version-check", "--quiet"]
NO_BUILD = r"No module named pip|No matching distribution found for hatchling"


def environment(**changes: str) -> dict[str, str]:
    """The environment without what leads to the checkout."""
    return {key: value for key, value in os.environ.items() if key != "PYTHONPATH"} | changes


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> pathlib.Path:
    folder = tmp_path_factory.mktemp("wheel")
    command = [*PIP, "wheel", "--no-deps", "--retries", "1", "--wheel-dir", str(folder), str(ROOT)]
    built = subprocess.run(command, env=environment(), capture_output=True, text=True)
    if found := re.search(NO_BUILD, built.stdout + built.stderr):
        pytest.skip(f"needs pip and hatchling, installed or from the network: {found[0]}")
    assert built.returncode == 0, built.stderr
    (file,) = folder.iterdir()
    return file


@pytest.fixture(scope="module")
def site(wheel: pathlib.Path, tmp_path_factory: pytest.TempPathFactory) -> pathlib.Path:
    """A folder with the wheel installed; what it depends on is this Python's."""
    folder = tmp_path_factory.mktemp("site")
    subprocess.run([*PIP, "install", "--no-deps", "--target", str(folder), str(wheel)], env=environment(), check=True)
    return folder


def test_one_small_wheel_for_all(wheel: pathlib.Path) -> None:
    assert re.fullmatch(r"rawattn-[\d.]+-py3-none-any\.whl", wheel.name)
    assert wheel.stat().st_size < 1_100_000


def test_wheel_carries_every_source(wheel: pathlib.Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        carried = {name: archive.read(name) for name in archive.namelist() if name.startswith("rawattn/")}
    kernels = [path for path in (ROOT / "cuda_src").rglob("*") if path.suffix in (".cu", ".cuh")]
    modules = [path for path in (ROOT / "rawattn").rglob("*") if path.is_file() and "__pycache__" not in path.parts]
    expected = {f"rawattn/{path.relative_to(ROOT).as_posix()}": path.read_bytes() for path in kernels}
    expected |= {path.relative_to(ROOT).as_posix(): path.read_bytes() for path in modules}
    assert kernels and "rawattn/py.typed" in expected
    assert carried == expected


def test_wheel_compiles_from_another_folder(site: pathlib.Path, tmp_path: pathlib.Path) -> None:
    (tmp_path / "elsewhere").mkdir()

    def run(*arguments: str) -> str:
        settings = environment(PYTHONPATH=str(site), RAWATTN_CACHE=str(tmp_path / "cache"))
        command = [sys.executable, *arguments]
        ran = subprocess.run(command, cwd=tmp_path / "elsewhere", env=settings, capture_output=True, text=True)
        assert ran.returncode == 0, ran.stdout + ran.stderr
        return ran.stdout

    assert pathlib.Path(run("-c", "import rawattn; print(rawattn.__file__)").strip()).is_relative_to(site)
    run("-m", "rawattn", "compile", "--arch", "sm_90a", "--dtype", "bf16", "--head-dim", "64")
    kernels = [path.read_bytes() for path in (tmp_path / "cache").glob("attn_fwd-*.cubin")]
    assert kernels and all(kernel[:4] == b"\x7fELF" for kernel in kernels)
    assert not list((tmp_path / "elsewhere").iterdir())
