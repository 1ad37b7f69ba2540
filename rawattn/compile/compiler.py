"""Source text to machine code: NVRTC, behind a memory and a disk cache that hold each kernel by the hash of its source.

The cache folder holds

    NAME-KEY.cubin      one kernel: the ELF file of the GPU, JSON text of what is known of it, the ELF file's length, a seal
    rawattn-XX.lock     empty; held while a kernel whose key begins with XX is compiled, so that of many processes one does it
    failed/KEY/         a source that NVRTC refused, as files, with its log
    numba/              what Numba compiled for the CPU path

An entry is written under a temporary name and renamed, so readers need no lock. NVRTC and CuPy are imported only to compile.
Where the folder cannot be used, whatever the reason, a CacheWarning says so once and kernels stay in memory. What a bundle has
(bundle.py) is taken from there, and the folder is not looked at.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import hashlib
import json
import os
import pathlib
import re
import struct
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from typing import Any, Literal

from ..errors import INSTALL, INSTALL_EITHER, CompileError, UnsupportedError
from . import cache

NVRTC_SINCE = {"sm_103": (12, 9), "sm_110": (13, 0), "sm_121": (12, 9)}  # the first that knows it, where 12.8 does not
NO_CACHE = "--no-cache"  # NVRTC's own, from which it takes a kernel without its log; 12.8 has none, and refuses the option
OPTIONS = (
    "--std=c++20",
    "--device-as-default-execution-space",
    NO_CACHE,
    "--no-source-include",  # else a header missing from Source.headers is taken from the current directory
    "--generate-line-info",  # for profilers and sanitizers: the same machine code in four times the file
    "--ptxas-options=-v",
)
LOCK_SECONDS = 60.0  # longest wait for a process that compiles the same kernel; a kernel takes about one second

MISSING_PART = (
    "NVRTC could not open {}, the part of it that lies beside it, in two tries: install its package again (pip install "
    "--force-reinstall --no-deps nvidia-cuda-nvrtc, or nvidia-cuda-nvrtc-cu12), or add that file's folder to LD_LIBRARY_PATH"
)

_SEAL_BYTES = 40


@dataclasses.dataclass(frozen=True)
class Source:
    """Everything that NVRTC is given: nothing else can reach a compilation.

    ``name`` is the file that ``text`` is from ("attn_fwd.cu"), ``headers`` hold (path as in ``#include``, text) of every
    header, and ``arch`` is the target ("sm_90a").
    """

    name: str
    text: str
    headers: tuple[tuple[str, str], ...]
    arch: str

    @property
    def options(self) -> tuple[str, ...]:
        """The options on NVRTC's command line."""
        return (f"--gpu-architecture={self.arch}", *OPTIONS)

    @functools.cached_property
    def key(self) -> str:
        """The sha256 of the source, in hexadecimal, without NVRTC's version: so a filled cache serves where there is no NVRTC."""
        return _hash(self.name, self.text, sorted(self.headers), self.options)


@dataclasses.dataclass(frozen=True)
class Binary:
    """A compiled source. ``seconds`` is what NVRTC took, once, and ``nvrtc`` its version; ``origin`` is where it came from."""

    cubin: bytes = dataclasses.field(repr=False)
    log: str = dataclasses.field(repr=False)
    nvrtc: str
    seconds: float
    origin: Literal["compiled", "disk", "memory", "bundle"]
    key: str

    @property
    def registers(self) -> int:
        """Registers per thread, of the entry that uses most."""
        return max(map(int, re.findall(r"Used (\d+) registers", self.log)), default=0)

    @property
    def spill_bytes(self) -> int:
        """Bytes per thread of spill stores and spill loads together, over all functions."""
        return sum(map(int, re.findall(r"(\d+) bytes spill (?:stores|loads)", self.log)))

    @property
    def advisories(self) -> tuple[str, ...]:
        """The codes of ptxas' messages on wgmma, such as C7510: "instructions are serialized"; none is what a kernel wants."""
        return tuple(sorted(set(re.findall(r"\((C75\d\d)\)", self.log))))


_loading = threading.Lock()
_memory: dict[str, Binary] = {}
_bundled: dict[str, Binary] = {}
_locks: dict[str, threading.Lock] = {}


def _hash(*parts: object) -> str:
    return hashlib.sha256(json.dumps(parts).encode()).hexdigest()


def compile(source: Source, on_compile: Callable[[], None] | None = None) -> Binary:
    """The machine code of a source: from memory, a bundle or disk, or compiled now. Threads and processes share one compilation.

    ``on_compile`` is called where neither cache has it, before NVRTC runs here or in a process that this call then waits for.

    Raises CompileError where NVRTC refuses the source, UnsupportedError where there is no NVRTC, or one that does not know the
    architecture yet. Warns once per process with CacheWarning where the cache folder cannot be used.
    """
    if (at_hand := _find_at_hand(source)) is not None:
        return at_hand
    with _locks.setdefault(source.key, threading.Lock()):
        if (at_hand := _find_at_hand(source)) is not None:
            return at_hand
        folder = _find_folder()
        binary = _read(folder, source)
        if binary is None:
            if on_compile is not None:
                on_compile()
            with sole_process(folder, source.key):
                binary = _read(folder, source) or _store(folder, source, _run_nvrtc(source))
        _memory[source.key] = dataclasses.replace(binary, origin="memory")
    return binary


def compile_together(source: Source, others: Iterable[Source], on_compile: Callable[[], None] | None = None) -> Binary:
    """The machine code of a source, as of ``compile``. If it has to be compiled, so are ``others``, at the same time, to be there
    when they are needed. What NVRTC refuses of them says so then."""
    if _find_at_hand(source) or ((folder := _find_folder()) is not None and os.path.exists(_find_entry(folder, source))):
        return compile(source, on_compile)
    from concurrent.futures import ThreadPoolExecutor  # takes 10 ms to import

    with ThreadPoolExecutor() as pool:
        for other in others:
            pool.submit(compile, other)
        return compile(source, on_compile)


def compile_all(sources: Iterable[Source]) -> dict[str, Binary]:
    """The machine code of sources, by their keys, compiled at the same time: NVRTC leaves other threads their time. Those are
    missing that would have to be compiled where there is no NVRTC."""
    from concurrent.futures import ThreadPoolExecutor  # takes 10 ms to import

    def compile_or_none(source: Source) -> Binary | None:
        try:
            return compile(source)
        except UnsupportedError:
            return None

    listed = [*sources]
    if all(map(_find_at_hand, listed)):
        binaries = [*map(_find_at_hand, listed)]
    else:
        with ThreadPoolExecutor() as pool:
            binaries = [*pool.map(compile_or_none, listed)]
    return {source.key: binary for source, binary in zip(listed, binaries, strict=True) if binary is not None}


def recompile(source: Source) -> Binary:
    """The machine code of a source, compiled now, for where the driver refuses what the caches have: that leaves them first.

    Raises and warns as ``compile`` does.
    """
    with _locks.setdefault(source.key, threading.Lock()):
        _memory.pop(source.key, None)
        folder = _find_folder()
        if folder is not None:
            with contextlib.suppress(OSError):  # not there, or not to be removed: _store says so
                _find_entry(folder, source).unlink()
        with sole_process(folder, source.key):
            binary = _store(folder, source, _run_nvrtc(source))
        _memory[source.key] = dataclasses.replace(binary, origin="memory")
    return binary


def serve(binaries: Iterable[Binary]) -> None:
    """Serves ``binaries`` from now on, from memory. Of two for one source the first stays."""
    for binary in binaries:
        _bundled.setdefault(binary.key, binary)


def disassemble(cubin: bytes, *options: str) -> str:
    """nvdisasm's text of a kernel. Raises FileNotFoundError where there is no nvdisasm."""
    import importlib.metadata
    import shutil
    import subprocess
    import tempfile

    try:
        files = importlib.metadata.files("nvidia-cuda-nvdisasm") or []
    except importlib.metadata.PackageNotFoundError:
        files = []
    tool = next((str(file.locate()) for file in files if file.stem == "nvdisasm"), shutil.which("nvdisasm"))
    if tool is None:
        raise FileNotFoundError("nvdisasm is not here: pip install nvidia-cuda-nvdisasm")
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        return subprocess.run([tool, *options, file.name], check=True, capture_output=True, text=True).stdout


def nvrtc_version() -> str:
    """The version of the NVRTC that would compile, such as "13.5". Raises UnsupportedError where there is none."""
    return "{}.{}".format(*_nvrtc().getVersion())


def clear(unused: float = 0.0) -> tuple[int, int]:
    """Empties the memory and the disk cache; gives the number of files removed, locks aside, and their size in bytes. With
    ``unused``, a number of seconds, only files are removed that were not used for so long, which is known to a day.

    Only files that rawattn wrote are removed, and then its folders that this leaves empty. A process that compiles at the same
    time loses at worst its entry. Raises OSError where a file cannot be removed, and where the folder is not this user's alone.
    """
    if not unused:
        _memory.clear()
    folder = cache.cache_folder()
    if not folder.is_dir():
        return 0, 0
    cache.check(folder)
    count = size = 0
    for file in cache.files(folder):
        is_lock = file.path.suffix == ".lock"
        if (file.used <= time.time() - unused and not (unused and is_lock)) and cache.remove(file):
            size += file.bytes
            count += not is_lock
    cache.remove_empty(folder)
    return count, size


def _find_at_hand(source: Source) -> Binary | None:
    """The binary in memory or in a bundle. Memory is first: it has what took the place of a binary that the driver refused."""
    return _memory.get(source.key) or _bundled.get(source.key)


def _find_folder() -> pathlib.Path | None:
    """The cache folder; None, after a warning, where it cannot be used."""
    try:
        return cache.private_folder()
    except OSError as error:
        cache.warn_uncached(error)
        return None


def entry_name(source: Source) -> str:
    """The name of a source's file, without its ending, in the cache folder and in bundles."""
    return f"{pathlib.PurePath(source.name).stem}-{source.key}.cubin"


def _find_entry(folder: pathlib.Path, source: Source) -> pathlib.Path:
    return folder / entry_name(source)


def _read(folder: pathlib.Path | None, source: Source) -> Binary | None:
    """The binary of a source from the disk cache; None where there is none, or one that is not whole."""
    if folder is None:
        return None
    path = _find_entry(folder, source)
    try:
        entry = path.read_bytes()
    except OSError:
        return None
    cache.touch(path)
    return unpack(entry, source.key, "disk")


def unpack(entry: bytes, key: str, origin: Literal["disk", "bundle"]) -> Binary | None:
    """The binary that an entry holds; None where it is not whole, or is of another source than the one with this key."""
    data, seal = entry[:-_SEAL_BYTES], entry[-_SEAL_BYTES:]
    if seal != _seal(data):
        return None
    (elf_bytes,) = struct.unpack("<Q", data[-8:])
    facts = json.loads(data[elf_bytes:-8])
    return Binary(data[:elf_bytes], origin=origin, **facts) if facts["key"] == key else None


def pack(binary: Binary) -> bytes:
    """The entry of the disk cache that holds a binary."""
    facts = {"key": binary.key, "nvrtc": binary.nvrtc, "seconds": binary.seconds, "log": binary.log}
    data = binary.cubin + json.dumps(facts).encode() + struct.pack("<Q", len(binary.cubin))
    return data + _seal(data)


def _seal(data: bytes) -> bytes:
    """The end of an entry: a checksum of ``data``, which is all before it, and the version of the entry's form."""
    return hashlib.sha256(data).digest() + b"rawattn1"


def _store(folder: pathlib.Path | None, source: Source, binary: Binary) -> Binary:
    """Writes a binary's entry to the disk cache, and returns the binary, whether that worked or not."""
    if folder is None:
        return binary
    entry = _find_entry(folder, source)
    temporary = entry.with_name(f"{entry.name}.{os.urandom(16).hex()}.tmp")
    try:
        try:
            with open(temporary, "xb") as file:
                file.write(pack(binary))
            temporary.replace(entry)
        finally:
            temporary.unlink(missing_ok=True)
        cache.tidy(folder, entry)
    except OSError as error:
        cache.warn_uncached(error)
    return binary


@contextlib.contextmanager
def sole_process(folder: pathlib.Path | None, key: str) -> Iterator[None]:
    """Keeps other processes from compiling the same kernel; goes ahead without a lock where none can be had.

    The system frees the lock of a process that dies. There are 256 lock files at most, whatever is compiled.
    """
    if folder is None:
        yield
        return
    import filelock

    lock = filelock.FileLock(folder / f"rawattn-{key[:2]}.lock", timeout=LOCK_SECONDS)
    with contextlib.suppress(OSError, NotImplementedError):  # no writing, no locks in this file system, or LOCK_SECONDS passed
        lock.acquire()
    try:
        yield
    finally:
        lock.release()


def _nvrtc() -> Any:
    try:
        with _loading:  # of threads that load it at once, one might use NVRTC 13.0 before another has loaded its builtins
            from cupy.cuda import nvrtc

            nvrtc.getVersion()  # CuPy loads the library at the first call
    except (ImportError, OSError, RuntimeError) as error:
        reason = str(error).strip().partition("\n")[0]
        raise UnsupportedError(f"compiling a kernel needs CuPy and NVRTC ({reason}); {INSTALL_EITHER}") from error
    return nvrtc


def _run_nvrtc(source: Source, again: bool = True) -> Binary:
    nvrtc = _nvrtc()
    if nvrtc.getVersion() < (since := NVRTC_SINCE.get(source.arch, (0, 0))):
        needed = f"{source.name} for {source.arch} needs NVRTC {since[0]}.{since[1]} or later, and this is {nvrtc_version()}"
        raise UnsupportedError(f"{needed}; {INSTALL[13]} (NVIDIA driver 580 or newer)")
    begin = time.perf_counter()
    paths, texts = [name.encode() for name, _ in source.headers], [text.encode() for _, text in source.headers]
    options = [option for option in source.options if option != NO_CACHE or nvrtc.getVersion() >= (12, 9)]
    program = nvrtc.createProgram(source.text, source.name, texts, paths)
    try:
        try:
            nvrtc.compileProgram(program, options)
        except nvrtc.NVRTCError as error:
            log = nvrtc.getProgramLog(program)
            if (part := re.search(r"failed to open (lib\S*\w)", log)) is None:
                raise _make_refusal(source, log, str(error)) from None
            if not again:
                raise CompileError(f"{source.name} for {source.arch}: {MISSING_PART.format(part[1])}", log) from None
            time.sleep(1.0)  # another library may be loading it
            return _run_nvrtc(source, again=False)
        cubin, log = _complete(nvrtc.getCUBIN(program)), nvrtc.getProgramLog(program)
    finally:
        nvrtc.destroyProgram(program)
    return Binary(cubin, log, nvrtc_version(), time.perf_counter() - begin, "compiled", source.key)


def _make_refusal(source: Source, log: str, status: str) -> CompileError:
    """The error for a refused source, which is kept as files for the user to read, where that can be done."""
    lines = [line.strip() for line in log.splitlines()]
    first = next((line for line in lines if re.search(r"\b(error|fatal)\s*:", line)), status)
    files = {**dict(source.headers), source.name: source.text, "nvrtc.log": f"{' '.join(source.options)}\n{log}"}
    try:
        folder = cache.private_folder("failed", source.key)
        for path, text in files.items():
            cache.make((folder / path).parent)
            (folder / path).write_text(text, encoding="utf-8")
    except OSError:
        return CompileError(f"{source.name} for {source.arch}: {first}", log)
    return CompileError(f"{source.name} for {source.arch}: {first} (all that NVRTC was given is in {folder})", log, str(folder))


def _complete(cubin: bytes) -> bytes:
    """The ELF file ``cubin`` with its last byte, which CuPy's getCUBIN takes for the end of a string and drops.

    NVRTC puts one of the file's two tables last, and that ends in the high byte of a 64-bit size or alignment: zero.
    """
    program_offset, section_offset = struct.unpack_from("<QQ", cubin, 32)
    program_size, programs, section_size, sections = struct.unpack_from("<HHHH", cubin, 54)
    end = max(program_offset + program_size * programs, section_offset + section_size * sections)
    return cubin + b"\0" if len(cubin) == end - 1 else cubin
