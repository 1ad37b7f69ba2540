"""The folder that keeps kernels from one process to the next, and whether it can be trusted.

What lies in it runs as code: a kernel on the GPU, and on the CPU too, since an index file of Numba is a pickle. So rawattn makes
its folders for their owner alone, and uses none that another user owns or may write.
"""

from __future__ import annotations

import errno
import os
import pathlib
import stat
import sys
import threading
import warnings

OTHERS_MAY_WRITE = stat.S_IWGRP | stat.S_IWOTH
_PACKAGE = str(pathlib.Path(__file__).parent)

warned = threading.Event()
_warning = threading.Lock()


class CacheWarning(RuntimeWarning):
    """The cache folder cannot be used: kernels are kept in memory only, and each process compiles its own."""


def cache_folder() -> pathlib.Path:
    """Returns the folder of kernels: the environment variable RAWATTN_CACHE, else the user's cache folder. It need not exist yet.

    Raises OSError where that depends on a home folder or a current folder which is unknown.
    """
    try:
        if given := os.environ.get("RAWATTN_CACHE"):
            return pathlib.Path(given).expanduser().absolute()
        import platformdirs

        folder = pathlib.Path(platformdirs.user_cache_dir("rawattn"))
    except RuntimeError as error:
        raise FileNotFoundError(f"the home folder is unknown: {error}") from error
    if not folder.is_absolute():  # some versions of platformdirs leave the ~ in it
        raise FileNotFoundError(f"the home folder is unknown, or XDG_CACHE_HOME is relative: the user's cache would be {folder}")
    return folder


def private_folder(*names: str) -> pathlib.Path:
    """The cache folder, or with names a folder in it, made where it is missing.

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
    link, found = folder.lstat(), folder.stat()
    if not stat.S_ISDIR(found.st_mode):
        raise NotADirectoryError(errno.ENOTDIR, "it is no folder", str(folder))
    if not hasattr(os, "geteuid"):  # no such owners and modes
        return
    for owner in (link.st_uid, found.st_uid):
        if owner not in (os.geteuid(), 0):
            raise PermissionError(
                f"{folder} belongs to the user with number {owner}, and what is in it would run as code of user {os.geteuid()}: "
                "remove it, or take another folder"
            )
    if found.st_mode & OTHERS_MAY_WRITE:
        raise PermissionError(
            f"other users may write into {folder}, and what is in it runs as your code: remove it, or, if all that is in it is "
            f"yours, chmod go-w {folder}"
        )


def warn_uncached(error: OSError) -> None:
    """Says once per process why nothing is kept, in the name of the first caller outside the package."""
    with _warning:
        if warned.is_set():
            return
        warned.set()
    frame, level = sys._getframe(1), 2
    while frame.f_back is not None and frame.f_code.co_filename.startswith(_PACKAGE):
        frame, level = frame.f_back, level + 1
    warnings.warn(
        f"the cache folder cannot be used ({error}): kernels stay in memory, and each process compiles its own, which takes "
        "seconds; let RAWATTN_CACHE name a folder of yours that can be written",
        CacheWarning,
        stacklevel=level,
    )
