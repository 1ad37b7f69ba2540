"""Bundles: written with NVRTC, and served where there is none, nor CuPy, nor a cache folder. No GPU is needed."""

from __future__ import annotations

import dataclasses
import functools
import io
import json
import os
import pathlib
import random
import re
import subprocess
import sys
import zipfile
from collections.abc import Callable, Iterator
from typing import Any

import pytest

import rawattn
from rawattn import __main__ as command_line
from rawattn import errors
from rawattn.array.array import Array
from rawattn.compile import compiler
from rawattn.driver import context
from rawattn.driver.device import TYPICAL, Device, boards
from rawattn.errors import BinaryError, ProblemError, UnsupportedError
from rawattn.operation import Append, AttentionKVCache, Forward, Operation
from rawattn.operation.spec import Spec
from rawattn.runtime import bundle, call_cache, loaded_kernel
from rawattn.runtime.model_config import Layer
from rawattn.runtime.select import select
from rawattn.serving import append, attention
from rawattn.variant.element import BF16
from tests.host.kernel.test_compile_matrix import is_known

OP = Forward(BF16, 1, 512, 512, 4, 4, 64, 64)
CAUSAL = dataclasses.replace(OP, spec=Spec.of(causal=True))
HOPPER, ADA = boards("sm_90a"), boards("sm_89")

# Loads a bundle as a process of a small container does, and takes a kernel from it.
SMALL = """\
import sys
for name in ("cupy", "cuda.pathfinder", "numba"):
    sys.modules[name] = None
import rawattn
from rawattn import Forward
from rawattn.compile import compiler
from rawattn.runtime import select
from rawattn.driver.device import TYPICAL
from rawattn.variant.element import BF16
print(rawattn.load_bundle(sys.argv[1]))
op = Forward(BF16, 1, 512, 512, 4, 4, 64, 64)
for arch in sys.argv[2:]:
    device = TYPICAL[arch]
    for program in select.select(op, device).programs(op, device):
        for launch in program.launches:
            print(compiler.compile(launch.source).origin)
"""


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> pathlib.Path:
    return tmp_path_factory.mktemp("cache")


@pytest.fixture(autouse=True)
def nothing_loaded(cache: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv("RAWATTN_CACHE", str(cache))
    forget()
    yield
    forget()


@pytest.fixture(scope="module")
def made(cache: pathlib.Path, tmp_path_factory: pytest.TempPathFactory) -> pathlib.Path:
    """A bundle with the kernels of OP for two architectures."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("RAWATTN_CACHE", str(cache))
        path = tmp_path_factory.mktemp("made") / "kernels.zip"
        rawattn.save_bundle([OP], path, ["sm_90a", "sm_89"])
    return path


def forget() -> None:
    compiler._memory.clear()
    compiler._bundled.clear()


def sources(op: Forward, device: Device) -> list[compiler.Source]:
    return [launch.source for program in select(op, device).programs(op, device) for launch in program.launches]


def members(path: pathlib.Path) -> dict[str, bytes]:
    with zipfile.ZipFile(path) as archive:
        return {name: archive.read(name) for name in archive.namelist()}


def zipped(path: pathlib.Path, content: dict[str, bytes]) -> pathlib.Path:
    with zipfile.ZipFile(path, "w") as archive:
        for name, data in content.items():
            archive.writestr(name, data)
    return path


def refusal(path: pathlib.Path) -> str:
    with pytest.raises(ProblemError) as caught:
        rawattn.load_bundle(path)
    assert not compiler._bundled, "all of it or nothing"
    assert str(path) in str(caught.value) and "python -m rawattn bundle" in str(caught.value)
    return str(caught.value)


def test_it_has_what_every_board_may_get(made: pathlib.Path) -> None:
    assert rawattn.load_bundle(made) == len(compiler._bundled) == len(members(made)) - 1
    wanted = {source.key for device in (*HOPPER, *ADA) for length in (1, 80, 4096) for source in sources(OP, device) if length}
    longer = dataclasses.replace(OP, batch=3, q_len=4096, kv_len=5000)
    wanted |= {source.key for device in (*HOPPER, *ADA) for source in sources(longer, device)}
    assert wanted == set(compiler._bundled) and len(HOPPER) > 2
    assert all(len(sources(OP, device)) < len(wanted) // 2 for device in HOPPER), "boards differ"
    elf = {binary.cubin[:4] for binary in compiler._bundled.values()}
    assert elf == {b"\x7fELF"} and {binary.origin for binary in compiler._bundled.values()} == {"bundle"}


def test_a_file_that_is_no_bundle_is_not_replaced(tmp_path: pathlib.Path) -> None:
    path = tmp_path / "operations.jsonl"
    path.write_text("mine\n")
    with pytest.raises(ProblemError, match=r"path is '.*operations\.jsonl', a file that is no bundle"):
        rawattn.save_bundle([], path, ["sm_90a"])
    assert path.read_text() == "mine\n"


def test_served_without_nvrtc_cupy_and_cache(made: pathlib.Path, tmp_path: pathlib.Path) -> None:
    nowhere = tmp_path / "nowhere"
    command = [sys.executable, "-W", "error", "-c", SMALL, str(made), "sm_90a", "sm_89"]
    ran = subprocess.run(command, env=os.environ | {"RAWATTN_CACHE": str(nowhere)}, capture_output=True, text=True)
    assert ran.returncode == 0, ran.stderr
    count, *origins = ran.stdout.split()
    assert int(count) == len(members(made)) - 1 and set(origins) == {"bundle"} and len(origins) > 3
    assert not nowhere.exists()
    ran = subprocess.run([*command, "sm_80"], env=os.environ | {"RAWATTN_CACHE": str(nowhere)}, capture_output=True, text=True)
    assert ran.returncode == 1 and "UnsupportedError: compiling a kernel needs CuPy and NVRTC" in ran.stderr


def test_the_cache_folder_is_not_looked_at(made: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refused() -> None:
        raise AssertionError("the cache folder")

    rawattn.load_bundle(made)
    monkeypatch.setattr(compiler, "_find_folder", refused)
    first, *others = sources(OP, HOPPER[0])
    assert others and compiler.compile_together(first, others).origin == "bundle"


@pytest.fixture
def ada(monkeypatch: pytest.MonkeyPatch) -> Device:
    """An L4 whose driver loads everything, in a place without NVRTC."""

    def missing() -> None:
        raise UnsupportedError(f"compiling a kernel needs CuPy and NVRTC (no such thing); {errors.INSTALL_EITHER}")

    monkeypatch.setattr(compiler, "_nvrtc", missing)
    monkeypatch.setattr(loaded_kernel, "_kernels", {})
    monkeypatch.setattr(context, "device", lambda index: ADA[0])
    monkeypatch.setattr(loaded_kernel, "LoadedFunction", lambda cubin, entry, index: (entry, cubin))
    return ADA[0]


def test_warm_up_from_a_bundle(made: pathlib.Path, ada: Device, tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RAWATTN_CACHE", str(tmp_path / "nowhere"))
    rawattn.load_bundle(made)
    assert rawattn.warm_up([OP]) == 1 and {key for key, _ in loaded_kernel._kernels} == {each.key for each in sources(OP, ada)}
    assert not (tmp_path / "nowhere").exists()


def test_what_is_missing_is_named(
    made: pathlib.Path, ada: Device, tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RAWATTN_CACHE", str(tmp_path / "cache"))
    rawattn.load_bundle(made)
    with pytest.raises(UnsupportedError) as caught:
        rawattn.warm_up([OP, CAUSAL])
    for words in (
        str(CAUSAL),
        ada.name,
        "attn_fwd_mma.cu for sm_89",
        "RAWATTN_LOG=FILE",
        "--arch sm_89 --spec FILE",
        "pip install",
    ):
        assert words in str(caught.value)


def test_a_bundle_that_the_driver_refuses(made: pathlib.Path, ada: Device, monkeypatch: pytest.MonkeyPatch) -> None:
    """As where its compiler is newer than the driver."""

    def refused(cubin: bytes, entry: str, index: int) -> None:
        raise BinaryError("cuModuleLoadData failed: CUDA_ERROR_INVALID_IMAGE (200).", 200)

    rawattn.load_bundle(made)
    monkeypatch.setattr(loaded_kernel, "LoadedFunction", refused)
    with pytest.raises(
        UnsupportedError, match=r"INVALID_IMAGE \(200\)\. NVRTC \d+\.\d+ made what was to be loaded; compiling a "
    ):
        rawattn.warm_up([OP])


def test_two_bundles(made: pathlib.Path, tmp_path: pathlib.Path) -> None:
    """Each adds its kernels, and what both have is the first one's."""
    second = tmp_path / "second.zip"
    rawattn.save_bundle([OP, CAUSAL], second, ["sm_90a"])
    assert rawattn.load_bundle(made) == (count := len(compiler._bundled))
    first = dict(compiler._bundled)
    for _ in range(2):
        rawattn.load_bundle(second)
        assert len(compiler._bundled) == count + len({each.key for device in HOPPER for each in sources(CAUSAL, device)})
    assert all(compiler._bundled[key] is binary for key, binary in first.items())


# ---- files that are refused


def test_made_of_other_sources(made: pathlib.Path, tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for changed in ({"version": "0.0.1"}, {"sources": "ab" * 32}):
        facts = json.loads(members(made)[bundle.MANIFEST])
        facts["made by"] |= changed
        content = members(made) | {bundle.MANIFEST: json.dumps(facts).encode()}
        said = refusal(zipped(tmp_path / "old.zip", content))
        assert f"made by rawattn {facts['made by']['version']} of the sources {facts['made by']['sources'][:12]}" in said
        assert f"this is rawattn {rawattn.__version__} of the sources" in said


def test_sources_are_the_kernels_and_the_package(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A change of one byte of what a kernel follows from is another maker; a test's or a note's is not."""
    hashes = set()
    for folder, file in (("package", "select.py"), ("package", "kernel/base.py"), ("cuda_src", "ptx/base.cuh"), ("", "")):
        for name in ("package/kernel", "cuda_src/ptx"):
            (tmp_path / name).mkdir(parents=True, exist_ok=True)
        for name in ("package/select.py", "package/kernel/base.py", "cuda_src/ptx/base.cuh", "package/note.md"):
            (tmp_path / name).write_text("x" if name == f"{folder}/{file}" else f"# {len(folder)}" if name.endswith("md") else "")
        monkeypatch.setattr(bundle.package, "FOLDER", tmp_path / "package")
        monkeypatch.setattr(bundle.render, "FOLDER", tmp_path / "cuda_src")
        hashes.add(bundle._identify.__wrapped__()["sources"])
    assert len(hashes) == 4


def test_of_another_form(made: pathlib.Path, tmp_path: pathlib.Path) -> None:
    facts = json.dumps({"form": "rawattn bundle 9"}).encode()
    assert "has the form 'rawattn bundle 9'" in refusal(zipped(tmp_path / "new.zip", {bundle.MANIFEST: facts}))


@pytest.mark.parametrize("name", ["../x", "/etc/x", "..\\x", "a/../../x.cubin", f"attn_fwd-{'0' * 64}.cubin", "bundle.json.bak"])
def test_members_that_nobody_put_there(made: pathlib.Path, tmp_path: pathlib.Path, name: str) -> None:
    before = sorted(tmp_path.parent.iterdir())
    content = members(made) | {name: b"x"}
    assert name.replace("\\", "") in refusal(zipped(tmp_path / "k.zip", content)).replace("\\", "")
    assert [path.name for path in tmp_path.iterdir()] == ["k.zip"] and sorted(tmp_path.parent.iterdir()) == before


def test_listed_names_lead_nowhere(made: pathlib.Path, tmp_path: pathlib.Path) -> None:
    """Also a name that the list has is only looked up in the archive, and its key is the seal's."""
    content = members(made)
    facts = json.loads(content[bundle.MANIFEST])
    name = facts["kernels"][0]
    facts["kernels"][0] = f"../../{name}"
    entry = content.pop(name)
    content |= {bundle.MANIFEST: json.dumps(facts).encode(), f"../../{name}": entry}
    assert rawattn.load_bundle(zipped(tmp_path / "k.zip", content)) == len(content) - 1
    assert [path.name for path in tmp_path.iterdir()] == ["k.zip"]


DAMAGES: dict[str, Callable[[dict[str, bytes], str], dict[str, bytes]]] = {
    "missing": lambda content, name: {key: data for key, data in content.items() if key != name},
    "one bit": lambda content, name: (
        content | {name: content[name][:5000] + bytes([content[name][5000] ^ 1]) + content[name][5001:]}
    ),
    "short": lambda content, name: content | {name: content[name][:-1]},
    "empty": lambda content, name: content | {name: b""},
    "another kernel": lambda content, name: content | {name: content[[*content][-1]]},
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_damaged_kernel(made: pathlib.Path, tmp_path: pathlib.Path, damage: str) -> None:
    content = members(made)
    name = json.loads(content[bundle.MANIFEST])["kernels"][0]
    assert name in refusal(zipped(tmp_path / "k.zip", DAMAGES[damage](content, name)))


@pytest.mark.parametrize("seed", range(40))
def test_damaged_file(made: pathlib.Path, tmp_path: pathlib.Path, seed: int) -> None:
    """A bit flipped anywhere, or an end that is lost: refused in words, or what is served is what was written."""
    draw, data = random.Random(seed), bytearray(made.read_bytes())
    expected = {name: data for name, data in members(made).items() if name != bundle.MANIFEST}
    path = tmp_path / "k.zip"
    at = draw.choice([draw.randrange(len(data)), draw.randrange(600), len(data) - 1 - draw.randrange(1500)])
    data[at] ^= 1 << draw.randrange(8)
    path.write_bytes(data if seed % 4 else data[:at])
    try:
        rawattn.load_bundle(path)
    except ProblemError as error:
        assert str(path) in str(error) and not compiler._bundled
    else:
        served = {f"-{key}.cubin": compiler.pack(binary) for key, binary in compiler._bundled.items()}
        assert served == {name[name.index("-") :]: data for name, data in expected.items()}


def test_no_archive(tmp_path: pathlib.Path) -> None:
    for data in (b"", b"text", zipfile_of({"x": b""}), zipfile_of({bundle.MANIFEST: b"[]"}), zipfile_of({bundle.MANIFEST: b"{"})):
        (tmp_path / "k.zip").write_bytes(data)
        assert "is damaged, or is no bundle" in refusal(tmp_path / "k.zip")
    with pytest.raises(FileNotFoundError, match=r"none\.zip"):
        rawattn.load_bundle(tmp_path / "none.zip")


def zipfile_of(content: dict[str, bytes]) -> bytes:
    memory = io.BytesIO()
    with zipfile.ZipFile(memory, "w") as archive:
        for name, data in content.items():
            archive.writestr(name, data)
    return memory.getvalue()


# ---- making one


def test_a_problem_leaves_the_file_as_it_was(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path, mine = tmp_path / "k.zip", b"PK\5\6" + bytes(18)  # a zip file that holds nothing
    path.write_bytes(mine)
    with pytest.raises(ProblemError, match=r"archs has 'sm_90'; it must have some of sm_75, .*sm_90a.* boards t4, .*4090"):
        rawattn.save_bundle([OP], path, ["sm_90"])
    with pytest.raises(ProblemError, match="operations is empty"):
        rawattn.save_bundle([], path, ["sm_90a"])
    with pytest.raises(ProblemError, match="archs is empty"):
        rawattn.save_bundle([OP], path, [])
    with pytest.raises(UnsupportedError, match=r"no kernel computes .* on T4"):
        rawattn.save_bundle([dataclasses.replace(OP, head_dim=600)], path, ["sm_75"])
    monkeypatch.setattr(compiler, "pack", lambda binary: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        rawattn.save_bundle([OP], path, ["sm_90a"])
    assert path.read_bytes() == mine and [each.name for each in tmp_path.iterdir()] == ["k.zip"]


def test_gpus_that_are_here_are_prepared_for(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    odd = dataclasses.replace(TYPICAL["sm_89"], name="odd", sm_count=3)
    other = dataclasses.replace(TYPICAL["sm_80"], name="other")
    monkeypatch.setattr(context, "device_count", lambda: 2)
    monkeypatch.setattr(context, "device", lambda index: (odd, other)[index])
    assert bundle._find_devices("sm_89") == [*ADA, odd] and bundle._find_devices("sm_90a") == HOPPER
    assert bundle._find_devices("4090") == [*ADA, odd] and bundle._find_devices("H100") == HOPPER


def test_command(tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str]) -> None:
    spec, out = tmp_path / "operations.jsonl", tmp_path / "kernels.zip"
    spec.write_text(f"{json.dumps(OP.to_json())}\n")
    command = ["bundle", "--arch", "sm_89,sm_90a", "--spec", str(spec), "--out", str(out)]
    assert command_line.main(command) == 0
    (count,) = re.findall(rf"^(\d+) kernels, \d\.\d MB, written to {re.escape(str(out))}$", capsys.readouterr().out.strip())
    assert rawattn.load_bundle(out) == int(count)
    assert command_line.main([*command, "--arch", "sm_12"]) == 1 and "archs has 'sm_12'" in capsys.readouterr().err
    spec.write_text("no\n")
    assert command_line.main(command) == 1 and "operations has the line 'no'" in capsys.readouterr().err


# ---- of usual models


@functools.cache
def usual_keys(device: Device) -> set[str]:
    return {source.key for op in bundle.usual_operations() for source in sources(op, device)}


@pytest.mark.parametrize("rows, packed", [(1, False), (1, True), (600, False), (600, True)])
@pytest.mark.parametrize("layer", bundle.USUAL, ids=lambda layer: f"{layer.name} {layer.window}")
def test_usual_operations_are_what_a_server_asks_for(
    layer: Layer, rows: int, packed: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Calls over pages, with other lengths and another number of sequences, need no other kernel."""
    torch, asked = pytest.importorskip("torch"), list[Operation]()

    def call_of(op: Operation, found: dict[str, Array], *_: object, **__: object) -> Callable[..., Any]:
        asked.append(dataclasses.replace(op, width=8) if isinstance(op, Append) else op)  # as on a GPU
        return lambda *_, **__: (found["k" if "q" not in found else "q"].object,) * 2

    monkeypatch.setattr(call_cache, "_calls", {})
    monkeypatch.setattr(append, "call_of", call_of)
    monkeypatch.setattr(attention, "call_of", call_of)
    cache = rawattn.KVCache(*torch.zeros(2, 150, 16, layer.kv_heads, layer.head_dim, dtype=torch.bfloat16))
    starts = {"cu_seqlens_q": torch.tensor([0, rows, 2 * rows, 3 * rows], dtype=torch.int32), "max_q_len": rows} if packed else {}
    step = rawattn.Step(torch.full((3,), 700, dtype=torch.int32), torch.zeros(3, 50, dtype=torch.int32), **starts)
    shape = (3 * rows,) if packed else (3, rows)
    q, k = (torch.zeros(*shape, heads, layer.head_dim, dtype=torch.bfloat16) for heads in (layer.heads, layer.kv_heads))
    angles = torch.zeros(900, layer.head_dim // 2)
    window = None if layer.window is None else (layer.window - 1, 0)
    sinks = torch.zeros(layer.heads) if layer.sinks else None
    for rotary in (None, rawattn.Rotary(angles, angles), rawattn.Rotary(angles.bfloat16(), angles.bfloat16())):
        rawattn.attention_append(q, k, k.clone(), cache, step, rotary=rotary, window=window, sinks=sinks)
    assert {type(op) for op in asked} == {Append, AttentionKVCache} and len({op.kind for op in asked}) == 4
    for device in (TYPICAL["sm_80"], HOPPER[0], TYPICAL["sm_121"]):
        for op in asked:
            assert {source.key for source in sources(op, device)} <= usual_keys(device), op


def test_command_without_a_spec(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It has all of usual models, for a board by its name."""
    given: list[tuple[Any, ...]] = []
    monkeypatch.setattr(command_line, "save_bundle", lambda *arguments: given.append(arguments) or 3)
    (tmp_path / "k.zip").touch()
    assert command_line.main(["bundle", "--arch", "spark,H100", "--out", str(tmp_path / "k.zip")]) == 0
    ((operations, path, archs, _),) = given
    assert operations == bundle.usual_operations() and path == tmp_path / "k.zip" and archs == ["spark", "H100"]


@pytest.mark.parametrize("arch", TYPICAL)
def test_usual_operations_are_computed_everywhere_but_on_turing(arch: str) -> None:
    if arch == "sm_75":
        with pytest.raises(UnsupportedError, match="it needs a GPU of compute capability 8"):
            usual_keys(TYPICAL[arch])
    else:
        assert 40 < len(usual_keys(TYPICAL[arch])) < 120, "it is meant to be small"


@pytest.mark.parametrize("arch", ["sm_103", "sm_110", "sm_121"])
def test_the_newest_architectures_have_bundles(arch: str, tmp_path: pathlib.Path) -> None:
    if not is_known(arch):
        pytest.skip("this NVRTC is older than the architecture")
    assert rawattn.save_bundle([OP], tmp_path / "k.zip", [arch]) == rawattn.load_bundle(tmp_path / "k.zip") > 0
    assert {binary.cubin[:4] for binary in compiler._bundled.values()} == {b"\x7fELF"}
