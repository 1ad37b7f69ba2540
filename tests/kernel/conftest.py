"""The kernels that the tests at hand need, compiled before the first of them, on all cores."""

from __future__ import annotations

import concurrent.futures
import contextlib
import dataclasses
import multiprocessing
from types import ModuleType

import pytest

from rawattn import compiler, driver
from rawattn.errors import RawattnError
from rawattn.select import select
from rawattn.testing import Case
from tests import calls


def sources(items: list[pytest.Item]) -> dict[str, compiler.Source]:
    """By key, what tests with a parameter ``case``, and perhaps ``kernel``, ``config`` and ``constant_time``, will compile."""
    found = {}
    for item in items:
        parameters = item.callspec.params if isinstance(item, pytest.Function) and hasattr(item, "callspec") else {}
        case = parameters.get("case")
        if isinstance(case, Case):
            with contextlib.suppress(RawattnError):  # the test will say so itself
                device, kernel = driver.device(0), parameters.get("kernel")
                problem = dataclasses.replace(case.problem, constant_time=parameters.get("constant_time", False))
                choice = select(problem, device, kernel and kernel.name, parameters.get("config"))
                source = choice.kernel.render(problem, choice.config, device.arch)
                found[source.key] = source
    return found


@pytest.fixture(autouse=True)
def kernel(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> ModuleType | None:
    """The kernel that ``tests.calls`` asks for in this test, where a parameter says one. Skips where it cannot run."""
    asked: ModuleType | None = getattr(request, "param", None)
    if asked is not None:
        if not asked.runs_on(driver.device(0)):
            pytest.skip(f"{asked.name} does not run on {driver.device(0).arch}")
        monkeypatch.setattr(calls, "KERNEL", asked.name)
    return asked


@pytest.fixture(scope="session", autouse=True)
def compiled(request: pytest.FixtureRequest) -> None:
    context = multiprocessing.get_context("spawn")  # this process may have CUDA threads already
    with concurrent.futures.ProcessPoolExecutor(mp_context=context) as pool:
        for job in [pool.submit(compiler.compile, source) for source in sources(request.session.items).values()]:
            job.exception()  # likewise
