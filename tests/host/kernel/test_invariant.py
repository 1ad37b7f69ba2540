"""``invariant=True``: a row's bits follow from its own sequence and constants of the model. On the CPU, and emulated."""

from __future__ import annotations

import dataclasses
import pathlib
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import rawattn
from rawattn import ProblemError, UnsupportedError
from rawattn.compile import compiler
from rawattn.driver.device import TYPICAL
from rawattn.kernel import attn_fwd, attn_fwd_mma
from rawattn.kernel.attn_decode import ATTN_DECODE
from rawattn.kernel.attn_decode_beside import ATTN_DECODE_AND_FWD, ATTN_DECODE_AND_FWD_MMA, few_config
from rawattn.operation import Forward
from rawattn.operation.operand import Layout
from rawattn.operation.spec import Spec
from rawattn.runtime.select import select
from rawattn.serving import attention
from rawattn.variant.element import BF16, E4M3, ELEMENTS, FP32
from tests.caches import Cached
from tests.decode import Decode
from tests.emulator.gpu import stand_in

OP = Forward(BF16, 1, 512, 512, 32, 8, 128, 128, Spec.of(causal=True, invariant=True))
SIZES = ((1, 1, 100), (1, 5, 5), (64, 1, 4096), (1, 4096, 4096), (8, 2048, 2048), (3, 300, 70))


def normal(*shape: int, dtype: str = "fp32", seed: int = 0) -> Any:
    return np.random.default_rng(seed).standard_normal(shape).astype(ELEMENTS[dtype].dtype)


def bits(*arrays: Any) -> list[bytes]:
    return [np.ascontiguousarray(x).tobytes() for x in arrays]


@settings(max_examples=25, deadline=None)
@given(st.data())
def test_rows_alone_on_the_cpu(data: Any) -> None:
    """A row has the same bits alone, with more queries beside it, and in a batch, dense, packed and over a cache of its own."""
    n, m, at = data.draw(st.integers(1, 40)), data.draw(st.integers(1, 400)), data.draw(st.integers(0, 39))
    dtype, group = data.draw(st.sampled_from(("fp32", "bf16"))), data.draw(st.sampled_from((1, 3)))
    left = data.draw(st.none() | st.integers(0, 150))
    n, at = min(n, m), at % min(n, m)
    options: dict[str, Any] = {
        "causal": True,
        "return_lse": True,
        "invariant": True,
        "window": None if left is None else (left, 0),
    }
    options["softcap"] = data.draw(st.sampled_from((None, 3.0)))
    q, k, v = normal(3, n, 2 * group, 16, dtype=dtype), *normal(2, 3, m, 2, 16, dtype=dtype, seed=1)
    o, lse = rawattn.attention(q, k, v, **options)
    end = m - n + at + 1  # of the keys that the row keeps
    alone = rawattn.attention(q[1:2, at : at + 1], k[1:2, :end], v[1:2, :end], **options)
    assert bits(o[1, at], lse[1, :, at]) == bits(alone[0][0, 0], alone[1][0, :, 0])
    starts = [np.array([0, 2, 2, 2 + n], np.int32), np.array([0, 7, 9, 9 + m], np.int32)]
    others = [normal(rows, heads, 16, dtype=dtype, seed=3) for rows, heads in ((2, 2 * group), (9, 2), (9, 2))]
    packed = [np.concatenate([other, x[1]]) for other, x in zip(others, (q, k, v), strict=True)]
    found = rawattn.attention_varlen(*packed, *starts, **options)
    assert bits(found[0][2:], found[1][:, 2:]) == bits(o[1], lse[1])


@settings(max_examples=15, deadline=None)
@given(st.data())
def test_sequences_over_caches_on_the_cpu(data: Any) -> None:
    lengths = st.tuples(st.integers(0, 9), st.integers(0, 300))
    case = Cached(
        tuple(data.draw(st.lists(lengths, min_size=1, max_size=4))), page_size=data.draw(st.sampled_from((4, 32))), heads=4,
        kv_heads=2, window=data.draw(st.sampled_from((None, (50, 0)))), sinks=data.draw(st.booleans()), whole=True,
    )  # fmt: skip
    options: dict[str, Any] = {"invariant": True, "return_lse": True, "window": case.window, "sinks": case.sink_logits()}
    q = case.rows(4, 16, 1)
    o, lse = rawattn.attention_kvcache(q, case.cache(), case.step(), **options)
    for i, (q_len, kv_len) in enumerate(case.lengths):
        k, v = (x[None] if len(x) else np.zeros((1, 1, 2, 16), np.float32) for x in case.keys(i))
        step = rawattn.Step(np.array([kv_len], np.int32))
        alone = rawattn.attention_kvcache(case.of(q, i)[None], rawattn.KVCache(k, v), step, **options)
        assert bits(case.of(o, i), case.of(lse.T, i)) == bits(alone[0][0], alone[1][0].T), (i, q_len)


class Twice(rawattn.score.Scale):
    """A score of one's own."""

    def logit(self, xp: Any, s: Any, batch: int, head: int, q: Any, kv: Any) -> Any:
        return 2 * s


@settings(max_examples=15, deadline=None)
@given(st.data())
def test_functions_on_the_cpu(data: Any) -> None:
    """By the formula, row by row: what it keeps alone decides a row's bits, not the keys behind, nor a cache's pages."""
    n, m, at = data.draw(st.integers(1, 40)), data.draw(st.integers(1, 400)), data.draw(st.integers(0, 39))
    n, at, slopes = min(n, m), at % min(n, m), normal(4)
    options: dict[str, Any] = {"return_lse": True, "invariant": True}
    options["mask"] = data.draw(st.sampled_from((rawattn.mask.Causal(), lambda q, kv: (q >= kv) & ((q - kv) % 5 < 3))))
    options["score"] = data.draw(st.sampled_from((Twice(), lambda s, h, q, kv: s + slopes[h] * (kv - q))))
    q, k, v = normal(3, n, 4, 16), *normal(2, 3, m, 2, 16, seed=1)
    o, lse = rawattn.attention(q, k, v, **options, q_offset=m - n)
    end = m - n + at + 1  # of the keys that the row keeps
    alone = rawattn.attention(q[1:2, at : at + 1], k[1:2, :end], v[1:2, :end], **options, q_offset=end - 1)
    if not isinstance(options["score"], Twice):
        own = {name: options[name] for name in ("mask", "score", "return_lse")}
        wanted = rawattn.reference.attention(q, k, v, **own, q_offset=m - n)
        np.testing.assert_allclose(o, wanted[0], 2e-5, 2e-5)
    assert bits(o[1, at], lse[1, :, at]) == bits(alone[0][0, 0], alone[1][0, :, 0])


def test_what_is_refused() -> None:
    q = normal(1, 4, 2, 16)
    with pytest.raises(ProblemError, match=r"invariant is True and dropout 0.5: which weights are dropped follows"):
        rawattn.attention(q, q, q, dropout=0.5, seed=1, invariant=True)
    with pytest.raises(ProblemError, match="invariant is 1; it must be True or False"):
        rawattn.attention(q, q, q, invariant=1)  # type: ignore[arg-type]


def test_as_a_value() -> None:
    assert Spec.from_json(OP.spec.to_json()) == OP.spec and OP.spec.to_json()["invariant"] is True
    assert "invariant" in str(OP) and OP.kind != dataclasses.replace(OP, spec=Spec.of(causal=True)).kind
    assert "invariant" not in Spec.of(causal=True).to_json()


def test_gradients_are_those_of_any_call() -> None:
    torch = pytest.importorskip("torch")
    q, k, v = (torch.from_numpy(x).requires_grad_() for x in normal(3, 1, 9, 2, 16))
    found = [torch.autograd.grad(rawattn.attention(q, k, v, invariant=x).square().sum(), (q, k, v)) for x in (True, False)]
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))


@pytest.mark.parametrize("arch", ["sm_90a", "sm_89"])
@pytest.mark.parametrize("changes", [{}, {"head_dim": 64, "head_dim_v": 96}, {"element": FP32}, {"sinks": True}], ids=str)
def test_one_kernel_and_configuration_for_all_lengths(arch: str, changes: dict[str, Any]) -> None:
    found = set()
    for batch, q_len, kv_len in SIZES:
        for varlen in (False, True):
            op = dataclasses.replace(
                OP,
                batch=batch,
                q_len=q_len,
                kv_len=kv_len,
                varlen=varlen,
                total_q=batch * q_len,
                total_kv=batch * kv_len,
                **changes,
            )
            selection = select(op, TYPICAL[arch])
            found.add((selection.kernel.name, selection.config))
            program = selection.kernel.lower(op, selection.config, TYPICAL[arch])
            assert len(program.launches) == 1, "keys are not split"
            assert "SpeculativeMax" not in dict(program.launches[0].source.headers)["config.cuh"]
    assert len(found) == 1, found


def differing_rows(invariant: bool, kernel: str, config: Any) -> int:
    """Rows of a batch whose bits are others than those that they have alone, by an emulated kernel."""
    torch = pytest.importorskip("torch")
    (n, m), generator = (100, 170), torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(2, *shape, 32, generator=generator) for shape in ((n, 2), (m, 1), (m, 1)))
    q, k, v = q.bfloat16(), (k * torch.linspace(0, 40, m)[:, None, None]).bfloat16(), v.bfloat16()
    options: dict[str, Any] = {"causal": True, "window": (90, 0), "softcap": 20.0, "return_lse": True, "kernel": kernel}
    options |= {"config": config, "invariant": invariant}
    (o, lse), count = rawattn.attention(q, k, v, **options), 0
    for at in (0, 1, 15, 16, 17, 49, 63, 64, 99):
        end = m - n + at + 1
        one = q[1:2, at : at + 1].clone(), k[1:2, :end].clone(), v[1:2, :end].clone()
        alone = rawattn.attention(*one, **options)
        count += not (torch.equal(alone[0][0, 0], o[1, at]) and torch.equal(alone[1][0, :, 0], lse[1, :, at]))
    return count


@pytest.mark.slow
def test_rows_alone_by_attn_fwd_mma(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    stand_in(monkeypatch, tmp_path, sm_count=3)
    config = attn_fwd_mma.AttnFwdMmaConfig(64, 32, 2, 1, 0, 2)
    assert differing_rows(True, "attn_fwd_mma", config) == 0 < differing_rows(False, "attn_fwd_mma", config)


@pytest.mark.slow
def test_rows_alone_by_attn_fwd(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    stand_in(monkeypatch, tmp_path, sm_count=3)
    assert differing_rows(True, "attn_fwd", attn_fwd.AttnFwdConfig(128, 48, 2, 1)) == 0


def over_caches(arch: str, **changes: Any) -> tuple[Any, Any, Any]:
    op = Decode(batch=3, heads=32, kv_heads=8, head_dim=128, head_dim_v=128, page=16, varlen=True, total_q=500).operation
    op = dataclasses.replace(op, **{"spec": Spec.of(causal=True, invariant=True), **changes})
    found = select(op, TYPICAL[arch])
    return found.kernel, found.config, found.kernel.lower(op, found.config, TYPICAL[arch])


def test_kernels_over_caches() -> None:
    """attn_decode has tiles of one size, whatever the bound; where sequences may have few rows or many there are two launches."""
    tiles = set()
    for q_len in (1, 4, 5, 8, 64):
        kernel, config, program = over_caches("sm_90a", q_len=q_len)
        assert kernel.name == "attn_decode" and len(program.launches) == 1
        tiles.add(config.tile_kv)
    assert tiles == {64}
    for arch, wanted in (("sm_90a", ATTN_DECODE_AND_FWD), ("sm_80", ATTN_DECODE_AND_FWD_MMA)):
        kernel, config, program = over_caches(arch, q_len=65)
        assert kernel is wanted and program.launches[0].entry == "attn_decode"
        assert program.launches[1].entry == kernel.name.partition("+")[2] and program.scratch
        assert all(launch.values["few_queries"] == 64 for launch in program.launches)
        assert over_caches(arch, q_len=65, ragged=False, total_q=195)[1] == config, "the same alone"
        assert over_caches(arch, q_len=65, total_q=0)[2].launches == ()
    assert over_caches("sm_90a", q_len=65, kv_element=E4M3)[0] is ATTN_DECODE_AND_FWD_MMA
    with pytest.raises(UnsupportedError, match=r"attn_fwd: q has a stride; or ask for .* kernel='attn_decode\+attn_fwd_mma'"):
        over_caches("sm_90a", q_len=65, layout=Layout("q has a stride"))  # other kernels are other bits
    assert over_caches("sm_90a", q_len=65, head_dim=40, head_dim_v=40)[0].name == "attn_fwd", "attn_decode takes none of them"
    with pytest.raises(UnsupportedError, match=r"attn_decode\+attn_fwd: it is for ragged steps, where sequences may have more"):
        select(Decode(page=16, q_len=300).operation, TYPICAL["sm_90a"], "attn_decode+attn_fwd")


def test_both_launches_compile() -> None:
    _, _, program = over_caches("sm_90a", q_len=100, head_dim=64, head_dim_v=64)
    for launch in program.launches:
        binary = compiler.compile(launch.source)
        assert not binary.spill_bytes and not binary.advisories, (launch.entry, binary.spill_bytes, binary.advisories)
    assert [launch.entry for launch in program.launches] == ["attn_decode", "attn_fwd"]


def test_functions_beside(monkeypatch: pytest.MonkeyPatch) -> None:
    """attn_decode goes beside another kernel in the configuration that it has alone, which is found by compiling; what a mask's
    arrays are asked for is made once."""
    spills = lambda source: "q_steps_in_registers = 2;" in dict(source.headers)["config.cuh"]  # noqa: E731
    log = lambda source: "64 bytes spill stores" * spills(source)  # noqa: E731
    monkeypatch.setattr(compiler, "compile", lambda source: compiler.Binary(b"", log(source), "", 0.0, "memory", source.key))
    case = Cached(((300, 400), (1, 20)), page_size=16, dtype="bf16", heads=8, kv_heads=2, head_dim=64, head_dim_v=64, whole=True)
    ids = np.zeros((2, 500), np.int32)
    options = {"window": None, "softcap": None, "scale": None, "score": None, "invariant": True}
    asked = attention.request_of(case.step(), {**options, "mask": lambda b, q, kv: ids[b, q] == ids[b, kv]}, False)
    op, _ = attention.attention_of(case.rows(8, 64, 1), case.cache(), case.step(max_q_len=300), asked, None)
    spilled = 0
    for arch, name in (("sm_90a", "attn_decode+attn_fwd"), ("sm_89", "attn_decode+attn_fwd_mma")):
        both, alone = (select(each, TYPICAL[arch]) for each in (op, dataclasses.replace(op, q_len=64)))
        program = both.kernel.lower(op, both.config, TYPICAL[arch])
        assert [each.entry for each in program.launches] == ["pyramid", "attn_decode", name.partition("+")[2]]
        first = ATTN_DECODE.candidates(op, TYPICAL[arch])[0]
        assert few_config(op, TYPICAL[arch]) == alone.config and (alone.config == first) is (first.q_steps_in_registers != 2)
        spilled += alone.config != first
        assert len({each.name for each in program.scratch}) == len(program.scratch) == 2 and both.kernel.name == name
    assert spilled


CHUNK = Cached(
    ((65, 90), (1, 70), (2, 3), (0, 5)), page_size=16, dtype="bf16", heads=8, kv_heads=2, head_dim=16, head_dim_v=16, whole=True
)


@pytest.mark.slow
def test_each_sequence_goes_to_its_own_kernel(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Emulated: a chunk beside sequences with few rows gives the bits that each of them has alone."""
    torch, word = pytest.importorskip("torch"), stand_in(monkeypatch, tmp_path, sm_count=3)
    q = torch.from_numpy(CHUNK.rows(8, 16, 1).astype(np.float32)).bfloat16()
    cache, step = CHUNK.cache("torch"), CHUNK.step("torch")
    o = rawattn.attention_kvcache(q, cache, step, invariant=True)
    starts = np.cumsum([0, *(n for n, _ in CHUNK.lengths)])
    for i, (q_len, _) in enumerate(CHUNK.lengths):
        rows = slice(int(starts[i]), int(starts[i + 1]))
        one = rawattn.Step(step.kv_lens[i : i + 1], step.page_table[i : i + 1], torch.tensor([0, q_len], dtype=torch.int32))
        if q_len:
            assert torch.equal(rawattn.attention_kvcache(q[rows].clone(), cache, one, invariant=True), o[rows]), i
    plain = rawattn.attention_kvcache(q, cache, step)
    assert not torch.equal(plain[65:66], o[65:66]) and (plain.float() - o.float()).abs().max() < 0.05 and word[0] == 0
