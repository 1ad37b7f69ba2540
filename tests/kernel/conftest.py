"""The kernels that the tests at hand need, compiled before the first of them, on all cores."""

from __future__ import annotations

import concurrent.futures
import contextlib
import multiprocessing

import pytest

from rawattn import compiler, driver
from rawattn.choose import choose
from rawattn.errors import RawattnError
from rawattn.kernel import attn_fwd
from rawattn.testing import Case


def sources(items: list[pytest.Item]) -> dict[str, compiler.Source]:
    """By key, what tests with a parameter ``case``, and perhaps ``config``, will compile."""
    found = {}
    for item in items:
        parameters = item.callspec.params if isinstance(item, pytest.Function) and hasattr(item, "callspec") else {}
        case = parameters.get("case")
        if isinstance(case, Case):
            with contextlib.suppress(RawattnError):  # the test will say so itself
                choice = choose(case.problem, driver.device(0), attn_fwd.name, parameters.get("config"))
                source = attn_fwd.render(case.problem, choice.config)
                found[source.key] = source
    return found


@pytest.fixture(scope="session", autouse=True)
def compiled(request: pytest.FixtureRequest) -> None:
    context = multiprocessing.get_context("spawn")  # this process may have CUDA threads already
    with concurrent.futures.ProcessPoolExecutor(mp_context=context) as pool:
        for job in [pool.submit(compiler.compile, source) for source in sources(request.session.items).values()]:
            job.exception()  # likewise
