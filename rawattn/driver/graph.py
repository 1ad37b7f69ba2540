"""Graphs: which streams capture one, and what graphs keep alive."""

from __future__ import annotations

import contextlib
import ctypes
import gc
import threading
from collections.abc import Iterator
from typing import Any

from ..errors import DeviceError
from .context import call, check, current, library, relaxed_capture, version

_LEGACY, _PER_THREAD = 1, 2  # CU_STREAM_LEGACY, which 0 is too, and CU_STREAM_PER_THREAD: handles without a stream of their own
era = 0  # added to the streams' numbers; a new era makes strangers of all streams


def stream_state(stream: int, index: int = 0) -> tuple[int, bool]:
    """The number that tells a stream from all others, and whether the stream is capturing a graph.

    A stream is known by a number that no other one of this process ever has, as handles are used again. One that is capturing has
    its handle instead, since asking for the number would end the capture. ``index`` is the device that it belongs to.
    """
    if stream <= _LEGACY:  # one of it, never captured
        return 0, False
    if stream != _PER_THREAD:
        try:
            return _stream_state(stream)
        except DeviceError:  # most often: this thread has no context yet
            pass
    with current(index):
        return _stream_state(stream)


def _stream_state(stream: int) -> tuple[int, bool]:
    cuda = library()
    code, status = cuda.cuStreamIsCapturing(stream)
    if code:
        check("cuStreamIsCapturing", code)
    if status:
        return stream, True
    code, number = cuda.cuStreamGetId(stream)
    if code:
        check("cuStreamGetId", code)
    return number + era, False


_spared: list[bool] = []  # for each that spares a capture: whether Python collected garbage before it
_sparing = threading.Lock()


@contextlib.contextmanager
def spared_capture(stream: int, index: int) -> Iterator[None]:
    """A context in which Python collects no garbage if the stream is capturing a graph.

    To choose, compile and load a kernel makes many objects, which is when the collector runs. If it finds a graph that nobody
    holds any more, of whatever library, CUDA refuses to destroy that one, and spoils the one that is captured.
    """
    if not stream_state(stream, index)[1]:
        yield
        return
    with _sparing:
        _spared.append(gc.isenabled())
        gc.disable()
    try:
        yield
    finally:
        with _sparing:
            if _spared.pop():  # they end in any order: the last one finds what was before the first
                gc.enable()


# A lock of Python's C interface tells that a graph is gone: the driver releases it, in a thread of its own and without the
# interpreter. A callback into Python would have to wait for the interpreter's lock, and where Python is shutting down that ends
# the thread (PyGILState_Ensure, before Python 3.14), which the driver does not expect of its own.
_allocate_lock = ctypes.pythonapi["PyThread_allocate_lock"]
_allocate_lock.argtypes, _allocate_lock.restype = (), ctypes.c_void_p
_acquire_lock = ctypes.pythonapi["PyThread_acquire_lock"]
_acquire_lock.argtypes = ctypes.c_void_p, ctypes.c_int
_RELEASE_LOCK = ctypes.cast(ctypes.pythonapi["PyThread_release_lock"], ctypes.c_void_p).value
_locks: list[int] = []  # of graphs that are gone, acquired again


class _KeptObjects:
    """The objects that a graph keeps alive."""

    def __init__(self, graph: Any) -> None:
        """Gives the graph a user object, which the driver destroys with the graph and all that is made of it."""
        cuda = library()
        self.things: list[object] = []
        self._lock = _locks.pop() if _locks else _allocate_lock()
        _acquire_lock(self._lock, 0)
        flag = cuda.CUuserObject_flags.CU_USER_OBJECT_NO_DESTRUCTOR_SYNC
        user_object = call("cuUserObjectCreate", self._lock, _RELEASE_LOCK, 1, int(flag))
        move = cuda.CUuserObjectRetain_flags.CU_GRAPH_USER_OBJECT_MOVE
        call("cuGraphRetainUserObject", graph, user_object, 1, int(move))

    def is_over(self) -> bool:
        """Says whether the graph is gone. Callers ask until it is; its lock may serve another graph then."""
        gone = bool(_acquire_lock(self._lock, 0))
        if gone:
            _locks.append(self._lock)
        return gone


_kept: dict[int, _KeptObjects] = {}  # by the capture's number, which no other one of this process ever has
_keeping = threading.Lock()


def retain(stream: int, thing: object) -> None:
    """Keeps an object alive as long as the graph that the stream is capturing, and all graphs that are made of it.

    It is dropped by the next call of ``retain`` or ``drop`` after that.
    """
    drop()
    # Version 3, in bindings 13 the only one, is for graphs with programmatic dependent launches: version 2 may refuse these.
    newer = hasattr(library(), "cuStreamGetCaptureInfo_v3") and version() >= (12, 3)
    status, number, graph, *_ = call("cuStreamGetCaptureInfo_v3" if newer else "cuStreamGetCaptureInfo", stream)
    if status != 1:  # CU_STREAM_CAPTURE_STATUS_ACTIVE
        raise DeviceError(f"stream {stream:#x} is not capturing a graph ({status.name}); only a graph can keep something alive.")
    with _keeping:
        if int(number) not in _kept:
            _kept[int(number)] = _KeptObjects(graph)
        _kept[int(number)].things.append(thing)


def drop() -> None:
    """Drops the objects that graphs kept alive which are gone."""
    with _keeping:
        gone = [_kept.pop(number) for number in [number for number, kept in _kept.items() if kept.is_over()]]
    if gone:
        with relaxed_capture():  # what goes may free memory
            del gone  # outside the lock, as it runs code of its own
