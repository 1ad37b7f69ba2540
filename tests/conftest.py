"""This module holds what all tests share: a cache folder of their own, the path for processes they start, and the reason to skip
GPU tests."""

from __future__ import annotations

import functools
import gc
import os
import pathlib
import tempfile
from collections.abc import Iterator

import hypothesis
import pytest

ROOT = pathlib.Path(__file__).resolve().parent.parent
pytest_plugins = ["tests.record", "tests.watchdog"]
CACHE, BUILT = pytest.StashKey[tempfile.TemporaryDirectory[str]](), pytest.StashKey[tempfile.TemporaryDirectory[str]]()

hypothesis.settings.register_profile("rawattn", hypothesis.settings(), deadline=None)  # a first call compiles
hypothesis.settings.load_profile("rawattn")


def pytest_configure(config: pytest.Config) -> None:
    """Keeps the tests out of the user's cache (RAWATTN_CACHE=FOLDER keeps what they compile), and lets subprocesses import us."""
    config.addinivalue_line("filterwarnings", "error::rawattn.LayoutWarning")  # no test has such shapes, but those for it
    os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")  # JAX would take most of a GPU's memory
    if workers := getattr(config.option, "numprocesses", None):  # by default each would use threads on all cores
        os.environ.setdefault("OMP_NUM_THREADS", str(max(1, (os.cpu_count() or 1) // workers)))
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
    if not os.environ.get("RAWATTN_CACHE"):
        config.stash[CACHE] = tempfile.TemporaryDirectory(prefix="rawattn-tests-", ignore_cleanup_errors=True)
        os.environ["RAWATTN_CACHE"] = config.stash[CACHE].name
    if not os.environ.get("RAWATTN_TESTS_BUILT"):  # what is compiled for the host; workers get it from here
        config.stash[BUILT] = tempfile.TemporaryDirectory(prefix="rawattn-built-", ignore_cleanup_errors=True)
        os.environ["RAWATTN_TESTS_BUILT"] = config.stash[BUILT].name


def pytest_collection_finish() -> None:
    """Later collections of garbage pass over what imports made: a million objects, half a second each time."""
    gc.freeze()


@functools.cache
def missing_gpu(which: str = "Hopper") -> str | None:
    """Says why tests marked ``gpu`` or ``gpu("any")`` cannot run here; None if they can."""
    needs = "needs a Hopper GPU" if which == "Hopper" else "needs a GPU of compute capability 7.5 or newer"
    try:
        from cupy.cuda import runtime

        properties = runtime.getDeviceProperties(0)
    except Exception as error:  # no CuPy, no driver, no device: each raises its own
        return f"{needs}: {error!r}".partition("\n")[0]
    capability = properties["major"], properties["minor"]
    fits = capability[0] == 9 if which == "Hopper" else capability >= (7, 5)
    return None if fits else f"{needs}, not {properties['name'].decode()}"


@pytest.fixture
def one_thread() -> Iterator[None]:
    """torch on one thread: for tiny sums more are slower, much slower on a busy machine."""
    import torch

    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture
def world() -> Iterator[None]:
    """Four processes of torch.distributed, of which this is one; the others are made up."""
    fake = pytest.importorskip("torch.testing._internal.distributed.fake_pg")
    import torch.distributed

    torch.distributed.init_process_group("fake", rank=0, world_size=4, store=fake.FakeStore())
    yield
    torch.distributed.destroy_process_group()


def pytest_runtest_setup(item: pytest.Item) -> None:
    marker = item.get_closest_marker("gpu")
    if marker and (reason := missing_gpu(*marker.args)):
        pytest.skip(reason)
