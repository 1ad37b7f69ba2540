"""Words of device memory that launches share: the zeros that schedules count in, and what was found violated."""

from __future__ import annotations

import collections
import ctypes
import functools
import threading

from . import graph
from .context import call, check_number, current, relaxed_capture, side_stream

COUNTERS = 1 << 18  # pairs on a device for streams, and as many at a time for launches that graphs hold
_LARGE_COUNTERS = 1 << 13  # pairs of each kind, where a launch has more than one
_CLEANED = 4096  # pairs of graphs that are cleaned at once, some 10 ms at most


class _Pair:
    """A pair of zeros that a captured launch counts in. It goes back when nothing holds it any more."""

    def __init__(self, address: int, returned: collections.deque[int]) -> None:
        self.address, self._returned = address, returned

    def __del__(self) -> None:
        self._returned.append(self.address)


class Counters:
    """Pairs of zeros in device memory, which the kernels' schedules count in and set back to zero; ``size`` bytes in place of 8
    for kernels that count more.

    A launch that is aborted ends its context, and these with it. Launches that may overlap need pairs of their own: each
    stream has one, since its launches follow each other, and each launch that a graph captures has one, since the graph may
    be replayed on any stream. Memory is allocated when the first is taken, and more of it where graphs hold all that there
    are.
    """

    def __init__(self, index: int, size: int = 8) -> None:
        self._index, self._lock, self._size = index, threading.Lock(), size
        self._count = COUNTERS if size == 8 else min(COUNTERS, _LARGE_COUNTERS)
        self._of_stream: dict[int, int] = {}
        self._streams = self._launches = 0  # how many streams have been given a pair, how many pairs captured launches have had
        self._first = 0  # address of the pairs of which captured launches get those that none has had
        self._clean: list[int] = []
        self._returned: collections.deque[int] = collections.deque()  # by graphs that are gone, with whatever is in them

    @functools.cached_property
    def _base(self) -> int:
        """The address of the default stream's pair, which those of streams and the first ones of captured launches follow."""
        return self._allocate(1 + 2 * self._count)

    def _allocate(self, count: int) -> int:
        """The address of ``count`` new pairs, in memory that is allocated for them."""
        with current(self._index), relaxed_capture():
            address = int(call("cuMemAlloc", self._size * count))
        self._clear([address], self._size * count)
        return address

    def _clear(self, addresses: list[int], size: int = 0) -> None:
        """Sets ``size`` bytes of device memory to zero, those of a launch where it is 0, without touching the legacy stream."""
        with current(self._index), relaxed_capture():
            stream = side_stream(self._index)
            for address in addresses:
                call("cuMemsetD8Async", address, 0, size or self._size, stream)
            call("cuStreamSynchronize", stream)

    def take(self, stream_id: int, captured: bool) -> int:
        """The address of the pair for a launch on the stream, by what ``stream_state`` says of it. The graph that captures the
        launch owns the pair."""
        graph.drop()
        if captured:
            with self._lock:
                pair = _Pair(self._give_launch(), self._returned)
            graph.retain(stream_id, pair)
            return pair.address
        with self._lock:
            if self._returned:  # better here than while a graph is captured
                self._clean_returned()
            if stream_id and stream_id not in self._of_stream:
                self._of_stream[stream_id] = self._give_stream()
            return self._of_stream[stream_id] if stream_id else self._base

    def _give_stream(self) -> int:
        """The address of a pair for a stream that has none.

        Streams come and go without a word, so pairs are given out in a ring. At each half of it a new era begins: all streams
        need new pairs, of the half ahead, and launches that were prepared for a stream are not found by its new number. One that
        another thread is about to issue at that moment has its pair for itself still, as the half behind is not given out.
        """
        if self._streams and self._streams % (self._count // 2) == 0:
            half = self._base + self._size * (1 + self._streams % self._count)
            with current(self._index):
                call("cuCtxSynchronize")
            self._clear([half], self._size * (self._count // 2))
            self._of_stream.clear()
            graph.era += 1 << 64
        self._streams += 1
        return self._base + self._size * (1 + (self._streams - 1) % self._count)

    def _give_launch(self) -> int:
        """The address of a pair for a captured launch."""
        is_full = self._launches % self._count == 0  # where captured launches have had all pairs there are
        if is_full and self._launches and not self._clean:
            self._clean_returned()
        if self._clean:
            return self._clean.pop()
        if is_full:
            self._first = self._allocate(self._count) if self._launches else self._base + self._size * (1 + self._count)
        self._launches += 1
        return self._first + self._size * ((self._launches - 1) % self._count)

    def _clean_returned(self) -> None:
        """Makes pairs that graphs gave back zero again: a launch may have been aborted."""
        pairs = [self._returned.popleft() for _ in range(min(len(self._returned), _CLEANED))]
        self._clear(pairs)
        self._clean += pairs


@functools.cache
def of_device(index: int, size: int) -> Counters:
    """The device's counters of ``size`` bytes for a launch."""
    return Counters(index, size)


@functools.cache
def violations(index: int) -> int:
    """The address of the device's word of what launches found violated; zero at first."""
    with current(index), relaxed_capture():
        address = int(call("cuMemAlloc", 8))
        stream = side_stream(index)
        call("cuMemsetD8Async", address, 0, 8, stream)
        call("cuStreamSynchronize", stream)
    return address


def take_violations(index: int) -> int:
    """Waits for the device, and gives and clears its word of violations."""
    check_number(index)
    word = ctypes.c_uint32()
    with current(index):
        call("cuCtxSynchronize")
        call("cuMemcpyDtoH", ctypes.addressof(word), violations(index), 4)
        call("cuMemsetD8", violations(index), 0, 4)
    return word.value
