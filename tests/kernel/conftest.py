"""The kernels that the tests at hand need, compiled before the first of them, on all cores."""

from __future__ import annotations

import concurrent.futures
import contextlib
import dataclasses
import multiprocessing
import os
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from rawattn.compile import compiler
from rawattn.driver import context
from rawattn.errors import RawattnError
from rawattn.operation import Backward
from rawattn.runtime.select import KERNELS_OF, select
from rawattn.testing import Case

BY_NAME = {kernel.name: kernel for kernels in KERNELS_OF.values() for kernel in kernels}


def sources(items: list[pytest.Item]) -> dict[str, compiler.Source]:
    """By key, what tests with a parameter ``case``, and perhaps ``kernel``, ``config`` and ``constant_time``, will compile. Those
    with a parameter ``dlse`` test the backward."""
    found: dict[str, compiler.Source] = {}
    for item in items:
        parameters = item.callspec.params if isinstance(item, pytest.Function) and hasattr(item, "callspec") else {}
        case = parameters.get("case")
        if isinstance(case, Case):
            with contextlib.suppress(RawattnError):  # the test will say so itself
                device, kernel = context.device(0), parameters.get("kernel")
                spec = dataclasses.replace(case.op.spec, constant_time=parameters.get("constant_time", False))
                forward = dataclasses.replace(case.op, spec=spec)
                ops: list[Any] = [forward] if "dlse" not in parameters else [forward, Backward(forward, parameters["dlse"])]
                for op in ops:
                    selection = select(op, device, (kernel and op is ops[-1] and kernel.name) or None, parameters.get("config"))
                    launches = selection.kernel.lower(op, selection.config, device).launches
                    found |= {launch.source.key: launch.source for launch in launches}
    return found


def pytest_runtest_setup(item: pytest.Item) -> None:
    """Skips a test whose parameter ``kernel``, or the kernel that it names, does not run here."""
    kernel = item.callspec.params.get("kernel") if isinstance(item, pytest.Function) and hasattr(item, "callspec") else None
    kernel = BY_NAME.get(kernel, kernel) if isinstance(kernel, str) else kernel
    if kernel is not None and context.device_count() and not kernel.runs_on(context.device(0)):
        pytest.skip(f"{kernel.name} does not run on {context.device(0).arch}")


@pytest.fixture(autouse=True)
def little_memory() -> Iterator[None]:
    """Gives back what torch keeps of the memory of a large test: other processes need the GPU, too."""
    yield
    if torch.cuda.is_available() and torch.cuda.memory_reserved() > 4 << 30:
        torch.cuda.empty_cache()


@pytest.fixture(scope="session", autouse=True)
def compiled(request: pytest.FixtureRequest) -> None:
    """Compiles them on all cores; under xdist each worker compiles its share."""
    worker, workers = os.environ.get("PYTEST_XDIST_WORKER", "gw0"), int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", "1"))
    share = [*sources(request.session.items).values()][int(worker.removeprefix("gw")) :: workers]
    context = multiprocessing.get_context("spawn")  # this process may have CUDA threads already
    with concurrent.futures.ProcessPoolExecutor(max(1, (os.cpu_count() or 1) // workers), mp_context=context) as pool:
        for job in [pool.submit(compiler.compile, source) for source in share]:
            job.exception()  # likewise
