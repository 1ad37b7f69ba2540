"""append on a GPU against its definition: rotary embeddings of both styles, whole and partial, slots, and queries on the way."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import pytest

import rawattn
from rawattn.testing import _move
from rawattn.variant.element import ELEMENTS
from tests.caches import Cached

pytest.importorskip("torch")
pytestmark = pytest.mark.gpu("any")
LENGTHS = ((8, 700), (1, 1), (0, 40), (3, 65), (5, 5), (1, 0), (2, 258))
CASE = Cached(LENGTHS, page_size=16, dtype="bf16", heads=8, kv_heads=2, head_dim=128, head_dim_v=128, device="cuda")


@dataclasses.dataclass(frozen=True)
class Call:
    case: Cached = CASE
    half: int = 0  # columns of cos and sin
    interleaved: bool = False
    q: bool = False
    in_place: bool = False
    slots: bool = False  # of rows in any order; every fourth is negative
    positions: bool = False
    angles: str = "fp32"


def of(**changes: Any) -> Cached:
    return dataclasses.replace(CASE, **changes)


CALLS = {
    "plain": Call(),
    "rotary": Call(half=64, q=True),
    "interleaved": Call(half=64, interleaved=True, q=True),
    "partial": Call(half=16, q=True, in_place=True),
    "interleaved, partial": Call(half=24, interleaved=True, q=True, angles="bf16"),
    "keys alone": Call(half=64, slots=True),
    "slots": Call(slots=True),
    "slots and q": Call(half=64, q=True, slots=True, positions=True),
    "slots, interleaved, partial": Call(of(layout="HND"), 20, True, True, slots=True, positions=True),
    "positions": Call(half=32, q=True, positions=True),
    "HND, interleaved pools": Call(of(layout="HND", pool="interleaved", page_size=1), 64, q=True),
    "end to end": Call(of(form="indptr", page_size=64), 64, interleaved=True, q=True),
    "dense": Call(of(form="dense", page_size=700), 64, q=True),
    "v in k": Call(of(pool="shared", head_dim_v=64), 64, q=True),
    "narrow": Call(of(head_dim=18, head_dim_v=7), 9, q=True),
    "fp16": Call(of(dtype="fp16", head_dim=80, head_dim_v=96), 40, q=True),
    "fp32": Call(of(dtype="fp32", head_dim=64, head_dim_v=64), 32, interleaved=True, q=True),
}


@pytest.mark.parametrize("name", CALLS)
def test_append(name: str) -> None:
    call = CALLS[name]
    case, device = call.case, call.case.device
    rows = {
        "k": case.rows(case.kv_heads, case.head_dim, 1), "v": case.rows(case.kv_heads, case.head_dim_v, 2),
        "q": case.rows(case.heads, case.head_dim, 3),
    }  # fmt: skip
    given = {x: _move(rows[x], "torch", device) for x in rows if (x != "v" or case.pool != "shared") and (x != "q" or call.q)}
    count, cache, step, options = len(rows["k"]), case.made(*case.pools(), "torch"), case.step("torch"), {}
    rng = np.random.default_rng(0)
    if call.half:
        angles = (case.normal(800, call.half, seed=seed).astype(ELEMENTS[call.angles].dtype) for seed in (5, 6))
        positions = _move(rng.integers(0, 800, count), "torch", device) if call.positions else None
        options["rotary"] = rawattn.Rotary(*(_move(x, "torch", device) for x in angles), call.interleaved, positions)
    if call.slots:
        slots = rng.permutation(cache.pages * cache.page_size)[:count]
        slots[::4] = -1 - slots[::4]
        options["slots"] = _move(slots, "torch", device)
    k, v, q = given["k"], given.get("v"), given.get("q")
    wanted = list(rawattn.reference.append(cache, step, k, v, q=q, **options))
    if call.in_place:  # where rows of no sequence stay as they are
        wanted[2] = np.where(np.isnan(wanted[2]), rows["q"].astype(np.float64), wanted[2])
    q_out = None if q is None else q if call.in_place else q.new_full(q.shape, float("nan"))
    assert rawattn.append(cache, step, k, v, q=q, q_out=q_out, **options) is q_out
    close = {"bf16": 2.0**-8, "fp16": 2.0**-11, "fp32": 1e-6}[case.dtype] if call.half else 0
    for found, exact in zip((cache.k, cache.v, q_out), wanted, strict=False):
        np.testing.assert_allclose(found.double().cpu().numpy(), exact, rtol=close, atol=1e-5 if close else 0)
    assert rawattn.violations() == ()


@pytest.mark.parametrize("name", [name for name in CALLS if CALLS[name].q and CALLS[name].half])
def test_queries_alone(name: str) -> None:
    """By a step of their own, whose lengths place them; the cache stays as it was."""
    call, case = CALLS[name], CALLS[name].case
    q = _move(case.rows(case.heads, case.head_dim, 3), "torch", case.device)
    angles = (case.normal(800, call.half, seed=seed).astype(ELEMENTS[call.angles].dtype) for seed in (5, 6))
    rotary = rawattn.Rotary(*(_move(x, "torch", case.device) for x in angles), call.interleaved)
    cache, step = case.made(*case.pools(), "torch"), case.step("torch")
    *_, wanted = rawattn.reference.append(cache, step, None, None, rotary=rotary, q=q)
    found = rawattn.append(cache, step, None, None, rotary=rotary, q=q, q_out=q.new_full(q.shape, float("nan")))
    close = {"bf16": 2.0**-8, "fp16": 2.0**-11, "fp32": 1e-6}[case.dtype]
    np.testing.assert_allclose(found.double().cpu().numpy(), wanted, rtol=close, atol=1e-5)
    assert cache.k.isnan().all() and rawattn.violations(q.device) == ()


def test_a_negative_position() -> None:
    """It is said of a row that goes into the cache, which is left out; a row with a negative slot may have one."""
    import torch

    k, angles = torch.ones(4, 1, 64, dtype=torch.float16, device="cuda"), torch.ones(9, 32, device="cuda")
    for slots, positions, said in (([0, 1, -1, 2], [3, 4, -1, 5], 0), ([0, 1, 2, 3], [3, -7, 4, 5], 1)):
        cache = rawattn.KVCache(*torch.zeros(2, 2, 8, 1, 64, dtype=torch.float16, device="cuda"))
        slots_there, positions_there = (torch.tensor(x, device="cuda") for x in (slots, positions))
        rotary = rawattn.Rotary(angles, angles, positions=positions_there)
        rawattn.append(cache, None, k, k, slots=slots_there, rotary=rotary)
        assert [each.partition(":")[0] for each in rawattn.violations()] == ["position"] * said
        written = [slot for slot, position in zip(slots, positions, strict=True) if slot >= 0 and position >= 0]
        assert torch.nonzero(cache.v.flatten(0, 2).any(1)).flatten().tolist() == written


def check_latent(device: str, record: bool, interleaved: bool, page_size: int) -> None:
    """Appends latent rows with the last 64 columns rotated, and q of these columns, to a cache of bf16 or of records."""
    import torch

    case = dataclasses.replace(CASE, kv_heads=1, pool="shared", head_dim=576, head_dim_v=512, device=device, page_size=page_size)
    k, q = (_move(case.rows(heads, columns, 1), "torch", device) for heads, columns in ((1, 576), (8, 64)))
    angles = (_move(case.normal(800, 32, seed=seed).astype(np.float32), "torch", device) for seed in (5, 6))
    rotary, step = rawattn.Rotary(*angles, interleaved, first_column=512), case.step("torch")
    pages = torch.full((len(case.pools()[0]), page_size + 1, 656), 255, dtype=torch.uint8, device=device)[:, :page_size]
    cache = rawattn.KVCache.records(pages) if record else case.made(*case.pools(), "torch")
    wanted = rawattn.reference.append(cache, step, k, None, rotary=rotary, q=q)
    q_out = rawattn.append(cache, step, k, None, rotary=rotary, q=q, q_out=torch.full_like(q, float("nan")))
    np.testing.assert_allclose(q_out.double().cpu().numpy(), wanted[-1], rtol=2.0**-8, atol=1e-5)
    if not record:
        np.testing.assert_allclose(cache.k.double().cpu().numpy(), wanted[0], rtol=2.0**-8, atol=1e-5)
        return
    found = cache.k.cpu()
    np.testing.assert_array_equal(found[..., :528].numpy(), wanted[0][..., :528])
    rest = [x[..., 528:].contiguous().view(torch.bfloat16).float() for x in (found, torch.from_numpy(wanted[0]))]
    np.testing.assert_allclose(*(x.numpy() for x in rest), rtol=2.0**-7, atol=1e-5)


@pytest.mark.parametrize("record", [False, True])
@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("page_size", [1, 64])
def test_latent_rows(record: bool, interleaved: bool, page_size: int) -> None:
    check_latent("cuda", record, interleaved, page_size)
    assert rawattn.violations() == ()
