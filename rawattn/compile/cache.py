"""The folder that keeps kernels from one process to the next: whether it can be trusted, what it holds, and how much.

What lies in it runs as code: a kernel on the GPU, and on the CPU too, since an index file of Numba is a pickle. So rawattn makes
its folders for their owner alone, and uses none that another user owns or may write.

The folder has a bound, 2 GB or what the environment variable RAWATTN_CACHE_GB says: it is the folder's, like its name, so all
processes that share it agree. Whoever adds a kernel removes what was not used for longest. A file's time of change is when it was
last used, to a day, as many file systems do not note when one is read. No lock is needed: processes that remove at the same time
remove the same files.
"""

from __future__ import annotations

import contextlib
import errno
import os
import pathlib
import re
import stat
import sys
import threading
import time
import warnings
from typing import NamedTuple

from .. import package
from ..errors import ProblemError

_PACKAGE = str(package.FOLDER)

LIMIT_GB = 2.0
STALE_SECONDS = 3600.0  # age at which a temporary file has lost its writer
DAY = 86400.0
OTHERS_MAY_WRITE = stat.S_IWGRP | stat.S_IWOTH
_OURS = re.compile(  # the paths in the cache folder that are rawattn's to remove
    r"\w+-[0-9a-f]{64}\.cubin(\.[0-9a-f]{32}\.tmp)?|rawattn-[0-9a-f]{2}\.lock"
    r"|failed/[0-9a-f]{64}/.+\.(cu|cuh|log)|numba/.+\.nb[ci](\.tmp\.\w+)?"
)

warned = threading.Event()
_warning = threading.Lock()


class CacheWarning(RuntimeWarning):
    """The cache folder cannot be used: kernels are kept in memory only, and each process compiles its own."""


def cache_folder() -> pathlib.Path:
    """Returns the folder of kernels: the environment variable RAWATTN_CACHE, else the user's cache folder. It need not exist yet.

    Raises OSError where that depends on a home folder or a current folder which is unknown.
    """
    try:
        if chosen := os.environ.get("RAWATTN_CACHE"):
            return pathlib.Path(chosen).expanduser().absolute()
        import platformdirs

        folder = pathlib.Path(platformdirs.user_cache_dir("rawattn"))
    except RuntimeError as error:
        raise FileNotFoundError(f"the home folder is unknown: {error}") from error
    if not folder.is_absolute():  # some versions of platformdirs leave the ~ in it
        raise FileNotFoundError(f"the home folder is unknown, or XDG_CACHE_HOME is relative: the user's cache would be {folder}")
    return folder


def private_folder(*names: str) -> pathlib.Path:
    """The cache folder, or the folder in it with these ``names``, made where it is missing.

    Raises OSError where it cannot be made, and where another user could have put files into it.
    """
    folder = cache_folder()
    for path in (folder, *(folder.joinpath(*names[: i + 1]) for i in range(len(names)))):
        try:
            make(path)
            check(path)
        except ValueError as error:  # a NUL byte
            raise OSError(errno.EINVAL, str(error), str(path)) from error
    return path


def make(folder: pathlib.Path) -> None:
    """Makes a folder, and those that it lies in, for this user alone, where they are missing."""
    try:
        folder.mkdir(0o700)
    except FileExistsError:
        return
    except FileNotFoundError:
        make(folder.parent)
        folder.mkdir(0o700, exist_ok=True)


def check(folder: pathlib.Path) -> None:
    """Raises PermissionError where another user than root owns a folder, or the link in its place, or may write into it.

    Folders above it may be anybody's: in one like /tmp, whose sticky bit is set, others can put nothing in the place of this one.
    """
    link, facts = folder.lstat(), folder.stat()
    if not stat.S_ISDIR(facts.st_mode):
        raise NotADirectoryError(errno.ENOTDIR, "it is no folder", str(folder))
    if not hasattr(os, "geteuid"):  # no such owners and modes
        return
    for owner in (link.st_uid, facts.st_uid):
        if owner not in (os.geteuid(), 0):
            raise PermissionError(
                f"{folder} belongs to the user with number {owner}, and what is in it would run as code of user {os.geteuid()}: "
                "remove it, or take another folder"
            )
    if facts.st_mode & OTHERS_MAY_WRITE:
        raise PermissionError(
            f"other users may write into {folder}, and what is in it runs as your code: remove it, or, if all that is in it is "
            f"yours, chmod go-w {folder}"
        )


class File(NamedTuple):
    """A file that rawattn wrote into the cache folder, when it was last used, and its size."""

    used: float
    bytes: int
    path: pathlib.Path

    @property
    def is_temporary(self) -> bool:
        return ".tmp" in self.path.suffixes


def files(folder: pathlib.Path) -> list[File]:
    """The files of rawattn in the cache folder, locks too, longest unused first. Files that go meanwhile are left out."""
    kept, now = [], time.time()
    for path in _list_paths(folder):
        with contextlib.suppress(OSError):
            facts = path.lstat()
            if facts.st_mtime > now:  # the clock was set back
                touch(path)
            if stat.S_ISREG(facts.st_mode):
                kept.append(File(min(facts.st_mtime, now), facts.st_size, path))
    return sorted(kept)


def _list_paths(folder: pathlib.Path) -> list[pathlib.Path]:
    paths = []
    for top in (folder, folder / "failed", folder / "numba"):
        for root, folders, names in os.walk(top):  # which passes over what it cannot read
            paths += [pathlib.Path(root, name) for name in names]
            if top == folder:
                folders.clear()
    return [path for path in paths if _OURS.fullmatch(path.relative_to(folder).as_posix())]


def touch(path: pathlib.Path) -> None:
    """Notes that a file is used now, unless that was noted less than a day ago. In a folder that cannot be written it is not."""
    with contextlib.suppress(OSError):
        if not 0 <= time.time() - path.stat().st_mtime < DAY:
            os.utime(path)


def remove(file: File) -> bool:
    """Removes a file; gives whether this process did. Raises OSError where it cannot be removed."""
    try:
        file.path.unlink()
    except FileNotFoundError:  # another process was faster
        return False
    return True


def remove_empty(folder: pathlib.Path) -> None:
    """Removes the folders below ``failed`` and ``numba`` that have nothing in them, and these."""
    for top in (folder / "failed", folder / "numba"):
        for root, _, _ in os.walk(top, topdown=False):
            with contextlib.suppress(OSError):  # not empty, or gone
                os.rmdir(root)


def limit() -> float:
    """The most bytes that the cache folder may hold. Raises ProblemError for a RAWATTN_CACHE_GB that is no number above 0."""
    text = os.environ.get("RAWATTN_CACHE_GB") or LIMIT_GB
    try:
        if (gigabytes := float(text)) > 0:
            return gigabytes * 1e9
    except ValueError:
        pass
    raise ProblemError(f"RAWATTN_CACHE_GB is {text!r}; it must be a number > 0, the gigabytes that the cache folder may hold.")


def tidy(folder: pathlib.Path, added: pathlib.Path) -> None:
    """Keeps the folder below its limit after a file was added, which stays, and removes what writers that died have left."""
    most, kept = limit(), files(folder)
    excess = sum(file.bytes for file in kept) - most
    for file in kept:
        is_stale = file.is_temporary and file.used < time.time() - STALE_SECONDS
        if is_stale or (excess > 0 and file.bytes and not file.is_temporary and file.path != added):
            with contextlib.suppress(OSError):  # it is not to be removed: others are
                remove(file)
                excess -= file.bytes


def warn_uncached(error: OSError) -> None:
    """Warns once per process that nothing is kept, because of ``error``, at the line of the first caller outside the package."""
    with _warning:
        if warned.is_set():
            return
        warned.set()
    frame, level = sys._getframe(1), 2
    while frame.f_back is not None and (
        frame.f_code.co_filename.startswith(str(package.FOLDER))
        or frame.f_globals.get("__name__", "").startswith("torch._dynamo")
    ):
        frame, level = frame.f_back, level + 1
    warnings.warn(
        f"the cache folder cannot be used ({error}): kernels stay in memory, and each process compiles its own, which takes "
        "seconds; let RAWATTN_CACHE name a folder of yours that can be written",
        CacheWarning,
        stacklevel=level,
    )
