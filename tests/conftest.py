"""What all tests share: a cache folder of their own, the path for processes they start, and the reason to skip GPU tests."""

from __future__ import annotations

import functools
import os
import pathlib
import tempfile

import hypothesis
import pytest

ROOT = pathlib.Path(__file__).resolve().parent.parent
pytest_plugins = ["tests.record"]
CACHE = pytest.StashKey[tempfile.TemporaryDirectory[str]]()

hypothesis.settings.register_profile("rawattn", hypothesis.settings(), deadline=None)  # a first call compiles
hypothesis.settings.load_profile("rawattn")


def pytest_configure(config: pytest.Config) -> None:
    """Keeps the tests out of the user's cache (RAWATTN_CACHE=FOLDER keeps what they compile), and lets subprocesses import us."""
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
    if not os.environ.get("RAWATTN_CACHE"):
        config.stash[CACHE] = tempfile.TemporaryDirectory(prefix="rawattn-tests-", ignore_cleanup_errors=True)
        os.environ["RAWATTN_CACHE"] = config.stash[CACHE].name


@functools.cache
def missing_gpu() -> str | None:
    """Why the tests marked ``gpu`` cannot run here; None where they can."""
    try:
        from cupy.cuda import runtime

        properties = runtime.getDeviceProperties(0)
    except Exception as error:  # no CuPy, no driver, no device: each raises its own
        return f"needs a Hopper GPU: {error!r}".partition("\n")[0]
    return None if properties["major"] == 9 else f"needs a Hopper GPU, not {properties['name'].decode()}"


def pytest_runtest_setup(item: pytest.Item) -> None:
    if item.get_closest_marker("gpu") and (reason := missing_gpu()):
        pytest.skip(reason)
