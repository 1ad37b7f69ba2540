"""Bundles: kernels in one file, for machines that shall not compile. A bundle is a zip archive of

    bundle.json         who made it, of which sources, for which devices, and the names of the kernels
    NAME-KEY.cubin      one kernel, as the cache folder has it, with its seal

A kernel is found by the key of its source, as in the cache folder, so neither NVRTC nor CuPy is needed to serve one. Nothing is
unpacked to a disk. The seals find damage; who may write the file may run code on the GPU.
"""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import io
import itertools
import json
import os
import pathlib
from collections.abc import Callable, Iterable
from typing import Any

from .. import package
from ..compile import compiler
from ..compile.compiler import Binary, Source
from ..driver import context
from ..driver.device import KNOWN, Device, board, boards
from ..errors import ProblemError
from ..kernel import render
from ..operation import Append, AttentionKVCache, Operation
from ..operation.spec import Spec
from ..variant.element import BF16, FP32
from .model_config import Layer
from .record import operations_of
from .select import select

MANIFEST, FORM = "bundle.json", "rawattn bundle 1"
REMEDY = "make it again with the version that loads it: python -m rawattn bundle"
USUAL = (  # layers of models that many serve
    Layer("Llama 3.2 1B", 32, 8, 64, 64),
    Layer("Llama 3 8B, Qwen3 8B, Mistral 7B", 32, 8, 128, 128),
    Layer("Llama 3 70B, Qwen3 32B", 64, 8, 128, 128),
    *(Layer("Gemma 3 12B", 16, 8, 256, 256, window=window) for window in (None, 1024)),
    *(Layer("Gemma 3 27B", 32, 16, 128, 128, window=window) for window in (None, 1024)),
    *(Layer("gpt-oss", 64, 8, 64, 64, window=window, sinks=True) for window in (None, 128)),
)


def usual_operations() -> list[Operation]:
    """The operations of ``attention_append`` in the layers ``USUAL``, in bf16 over pages of 16 rows: decoding and prefill,
    packed or with as many rows of each sequence, with neox rotary embeddings or none."""
    operations: list[Operation] = []
    for layer, q_len, ragged in itertools.product(USUAL, (1, 2048), (False, True)):
        size, rows = (layer.head_dim, layer.head_dim_v), 8 * q_len
        spec = Spec.of(causal=True, window=layer.window and (layer.window - 1, 0))
        pages: dict[str, Any] = {"pages": 4096, "page_size": 16, "form": "table", "table": 512, "ragged": ragged}
        step = AttentionKVCache(BF16, 8, q_len, 8192, layer.heads, layer.kv_heads, *size, spec=spec, total_q=rows, **pages)
        append = Append(BF16, 8, rows, q_len, 8192, layer.kv_heads, *size, lengths="table", width=8, **pages)
        rotary: dict[str, Any] = {"heads": layer.heads, "rotary": "neox", "rotary_dim": layer.head_dim, "max_positions": 8192}
        rotated = [dataclasses.replace(append, angles=angles, **rotary) for angles in (FP32, BF16)]
        operations += [dataclasses.replace(step, sinks=layer.sinks), append, *rotated]
    return operations


def save_bundle(
    operations: Iterable[Operation] | str | os.PathLike[str], path: str | os.PathLike[str], archs: Iterable[str],
    on_compile: Callable[[], None] | None = None,
) -> int:  # fmt: skip
    """Writes a file with all kernels that these operations, and others of their kinds, need; gives the number of kernels.

    >>> rawattn.save_bundle("operations.jsonl", "kernels.zip", ["sm_90a", "sm_89"])

    No GPU is needed. Which configurations a kind of operation gets depends on the number of multiprocessors: the file has those
    for the common boards of each architecture, and for the GPUs of this machine.

    Args:
        operations: operations such as ``rawattn.Forward``, or the path of a file that RAWATTN_LOG named in an earlier run.
        path: the file to write. A bundle that is there is replaced.
        archs: architectures, such as "sm_90a", or boards that have them, such as "h100".
        on_compile: called before each compilation.

    Raises:
        ProblemError: an architecture or a line of the file is wrong, or ``path`` is a file that is no bundle.
        UnsupportedError: no kernel computes one of the operations on one of the architectures, or a kernel has to be compiled
            and there is no NVRTC.
    """
    import zipfile

    if os.path.isfile(path) and os.path.getsize(path) and not zipfile.is_zipfile(path):
        raise ProblemError(f"path is {os.fspath(path)!r}, a file that is no bundle and would be lost; give another name.")
    ops = [variant for op in operations_of(operations) for variant in op.lying()]
    devices = [device for arch in archs for device in _find_devices(arch)]
    if not ops or not devices:
        raise ProblemError(f"{'archs' if ops else 'operations'} is empty; a bundle needs one at least.")
    sources: dict[str, Source] = {}
    for op in ops:
        for device in devices:
            launches = (launch for program in select(op, device).programs(op, device) for launch in program.launches)
            sources |= {compiler.entry_name(launch.source): launch.source for launch in launches}
    from concurrent.futures import ThreadPoolExecutor  # takes 10 ms to import

    with ThreadPoolExecutor() as pool:
        binaries = list(pool.map(lambda source: compiler.compile(source, on_compile), sources.values()))
    facts = {"form": FORM, "made by": _identify(), "devices": [*map(dataclasses.asdict, devices)], "kernels": [*sources]}
    _write(pathlib.Path(path), json.dumps(facts, indent=1), dict(zip(sources, binaries, strict=True)))
    return len(sources)


def load_bundle(path: str | os.PathLike[str]) -> int:
    """Serves the kernels of a file that ``save_bundle`` wrote, in this process, from now on; gives their number.

    >>> rawattn.load_bundle("kernels.zip")

    Calls that these kernels serve need neither NVRTC nor CuPy, and neither read nor write the cache folder. No GPU is looked for
    yet. Several files may be loaded; a kernel that two of them have is the first one's. Load only what you trust: it runs on the
    GPU.

    Raises:
        ProblemError: the file is damaged, is no bundle, or was made by another version.
        OSError: the file cannot be read.
    """
    data = pathlib.Path(path).read_bytes()
    try:
        binaries = _read(data)
    except ProblemError as error:
        raise ProblemError(f"the bundle {path} {error}; {REMEDY}") from None
    except Exception as error:  # zipfile and json raise anything
        raise ProblemError(f"the bundle {path} is damaged, or is no bundle ({error}); {REMEDY}") from error
    compiler.serve(binaries)
    return len(binaries)


def _find_devices(arch: str) -> list[Device]:
    if (match := board(arch)) is None:
        raise ProblemError(f"archs has {arch!r}; it must have some of {KNOWN}.")
    here = [context.device(index) for index in range(context.device_count())]
    return [*boards(match.arch), *(device for device in here if device.arch == match.arch)]


def _write(path: pathlib.Path, manifest: str, binaries: dict[str, Binary]) -> None:
    """Writes the archive under another name first, so that nobody reads half of it."""
    import zipfile

    temporary = path.with_name(f"{path.name}.{os.urandom(8).hex()}.tmp")
    content = {MANIFEST: manifest.encode()} | {name: compiler.pack(binary) for name, binary in binaries.items()}
    try:
        with zipfile.ZipFile(temporary, "x") as archive:
            for name, data in content.items():
                archive.writestr(zipfile.ZipInfo(name), data, zipfile.ZIP_DEFLATED)
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)


def _read(data: bytes) -> list[Binary]:
    """The kernels of an archive. Raises ProblemError with words that follow its name, or anything where it is damaged."""
    import zipfile

    with zipfile.ZipFile(io.BytesIO(data)) as archive:
        facts = json.loads(archive.read(MANIFEST))
        if facts["form"] != FORM:
            raise ProblemError(f"has the form {facts['form']!r}, and this version reads {FORM!r}")
        if facts["made by"] != _identify():
            raise ProblemError(
                f"was made by {_name(facts['made by'])}, and this is {_name(_identify())}, which would not find its kernels"
            )

        names = archive.namelist()
        if sorted(names) != sorted([MANIFEST, *facts["kernels"]]):
            other = sorted({*names} ^ {MANIFEST, *facts["kernels"]}) or "a member twice"
            raise ProblemError(f"is not as it was made: its list of kernels and what it holds differ by {other}")
        binaries = {name: compiler.unpack(archive.read(name), _parse_key(name), "bundle") for name in facts["kernels"]}
    broken = [name for name, binary in binaries.items() if binary is None]
    if broken:
        raise ProblemError(f"is damaged: {broken[0]} is not what was written")
    return [binary for binary in binaries.values() if binary is not None]


def _parse_key(name: str) -> str:
    return pathlib.PurePosixPath(name).stem.rpartition("-")[2]


@functools.cache
def _identify() -> dict[str, Any]:
    """The maker of a bundle: the version of rawattn, and a hash of all files that decide what is compiled and chosen."""
    files = [(path, path.relative_to(package.FOLDER)) for path in package.FOLDER.rglob("*") if path.suffix == ".py"]
    files += [(path, "cuda_src" / path.relative_to(render.FOLDER)) for path in render.FOLDER.rglob("*.cu*")]
    texts = sorted((name.as_posix(), path.read_text(encoding="utf-8")) for path, name in files)
    return {"version": package.__version__, "sources": hashlib.sha256(json.dumps(texts).encode()).hexdigest()}


def _name(maker: dict[str, Any]) -> str:
    return f"rawattn {maker['version']} of the sources {maker['sources'][:12]}"
