"""flash-attn's functions by the grids of its own tests: every pair of options counts, forward and backward, against a formula."""

from __future__ import annotations

import itertools
import random
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from rawattn.integrations import flash_attn as fa2  # noqa: E402
from rawattn.integrations import flash_attn_interface as fa3  # noqa: E402
from rawattn.variant.weight import Dropout  # noqa: E402


def formula(q: Any, k: Any, v: Any, *, first: int = 0, kept: Any = None, slopes: Any = None, **given: Any) -> tuple[Any, Any]:
    """o and lse of one sequence in float64: q is (q_len, heads, head_dim), keys count from ``first`` on, ``slopes`` is (heads,),
    and ``kept`` are the weights that dropout left, times what it multiplied them by."""
    q, k, v = (x.double() for x in (q, k, v))
    k, v = (x.repeat_interleave(q.shape[1] // k.shape[1], 1) for x in (k, v))
    s = torch.einsum("qhd,khd->hqk", q, k) * (given.get("softmax_scale") or q.shape[-1] ** -0.5)
    if given.get("softcap"):
        s = given["softcap"] * torch.tanh(s / given["softcap"])
    at, keys = torch.arange(len(q))[:, None] + len(k) - len(q), torch.arange(len(k))
    if slopes is not None:
        s = s - slopes.double()[:, None, None] * (at - keys).abs()
    left, right = map(int, given.get("window_size", (-1, -1)))
    right = 0 if given.get("causal") else right
    keep = (keys >= first) & (torch.tensor(left < 0) | (at - keys <= left)) & (torch.tensor(right < 0) | (keys - at <= right))
    size = given.get("attention_chunk", 0)
    if size:
        keep = keep & ((at - first).div(size, rounding_mode="floor") == (keys - first).div(size, rounding_mode="floor"))
    s = s.masked_fill(~keep, -torch.inf)
    lse = torch.logsumexp(s, -1)
    p = torch.where(torch.isinf(lse)[..., None], 0.0, torch.exp(s - torch.where(torch.isinf(lse), 0.0, lse)[..., None]))
    return torch.einsum("hqk,khd->qhd", p if kept is None else p * kept, v), lse


def near(found: Any, wanted: Any) -> None:
    bound = 2e-5 if found.dtype == torch.float32 and found.device.type == "cpu" else 3e-2
    torch.testing.assert_close(found.double().cpu(), wanted, rtol=bound, atol=bound)


DTYPES = {"cpu": torch.float32, "cuda": torch.bfloat16}
ON_GPU = pytest.mark.gpu("any")


PACKED = [(7, 12), (0, 5), (9, 9), (11, 4), (6, 0)]  # rows of q and of k: fewer, none, as many and more
DENSE, PAGED = [(11, 4)] * 2, [(7, 12), (0, 5), (9, 9), (2, 4)]
USED = {"seqused_q": torch.tensor([3, 0, 9, 8, 2]), "seqused_k": torch.tensor([10, 4, 6, 4, 0])}
SLOPES = torch.tensor([[0.5, 0.1, 0.0, 1.0]]) * torch.arange(1.0, 6)[:, None]
SHARED = {"softmax_scale": 0.3, "causal": True, "window_size": torch.tensor([5, 2]), "softcap": 2.0, "deterministic": True}
OPTIONS = {fa2: SHARED | {"alibi_slopes": SLOPES, "dropout_p": 0.3}, fa3: SHARED | {"attention_chunk": 7} | USED}
PAIRS = [
    (module, pair, lengths)
    for module, options in OPTIONS.items()
    for pair in itertools.combinations(options, 2)
    for lengths in (PACKED, DENSE, PAGED)
    if not (lengths is DENSE and {*pair} & {*USED}) and not (lengths is PAGED and (module is fa3 or "dropout_p" in pair))
]
NAMES = {id(PACKED): "packed", id(DENSE): "dense", id(PAGED): "paged"}


def weights(batch: int, q_len: int, kv_len: int) -> Any:
    """Gives what the weights of a sequence are multiplied by: 0, or dropout's factor, by the seed that a call draws next."""
    torch.manual_seed(3)
    drop, seed = Dropout(0.3), int(torch.randint(0, (1 << 63) - 1, (1,)))
    h, q, kv = (torch.arange(n).numpy() for n in (4, q_len, kv_len))
    torch.manual_seed(3)
    return torch.from_numpy(drop.kept(seed, batch, h[:, None, None], q[:, None], kv)) * drop.factor


def paged(x: Any, starts: list[int], table: Any) -> Any:
    """Writes the rows of sequences, which lie end to end, into pages of 4 rows."""
    pool = torch.full((table.numel(), 4, *x.shape[1:]), torch.nan)
    for pages, begin, end in zip(table.tolist(), starts, starts[1:], strict=False):
        for i in range(begin, end):
            pool[pages[(i - begin) // 4], (i - begin) % 4] = x[i].detach()
    return pool


@pytest.mark.parametrize(
    ("module", "pair", "lengths", "device"),
    [(*x, "cpu") for x in PAIRS] + [pytest.param(*x, "cuda", marks=ON_GPU) for x in PAIRS if "attention_chunk" in x[1]],
    ids=lambda x: NAMES.get(id(x)) or (x if isinstance(x, str) else "-".join(x) if isinstance(x, tuple) else x.__name__[-9:]),
)
def test_every_pair(module: Any, pair: tuple[str, ...], lengths: list[tuple[int, int]], device: str) -> None:
    """Forward and backward, of rows that are used; pages have no backward."""
    options, slopes = {name: OPTIONS[module][name] for name in pair}, [None] * 5
    if "alibi_slopes" in pair:
        slopes = options["alibi_slopes"] = SLOPES[: len(lengths)]
    options |= {name: options[name].int().to(device) for name in pair if name in USED}
    totals, counts = [[0, *itertools.accumulate(x)] for x in zip(*lengths, strict=True)], [*zip(*lengths, strict=True)]
    used = [options.get(name, count) for name, count in zip(USED, counts, strict=True)]
    draw = torch.Generator().manual_seed(1)
    shapes = (totals[0][-1], 4, 16), (totals[1][-1], 2, 16), (totals[1][-1], 2, 8), (totals[0][-1], 4, 8)
    *given, do = (torch.randn(shape, generator=draw).to(DTYPES[device]).float() for shape in shapes)
    q, k, v = (x.requires_grad_() for x in given)
    ours = [x.detach().to(device, DTYPES[device]).requires_grad_() for x in given]
    parts, rows = [], list[int]()
    for i, (begin, first) in enumerate(zip(*totals, strict=True)):
        if i < len(lengths):
            n, m = int(used[0][i]), int(used[1][i])
            kept, rows = weights(i, n, m) if "dropout_p" in pair else None, [*rows, *range(begin, begin + n)]
            part = q[begin : begin + n], k[first : first + m], v[first : first + m]
            parts.append(formula(*part, kept=kept, slopes=slopes[i], **options))
    wanted = torch.cat([o for o, _ in parts]), torch.cat([lse for _, lse in parts], 1)
    if lengths is not DENSE:
        starts, keys = [torch.tensor(x, dtype=torch.int32, device=device) for x in totals], ours[1:]
        if lengths is PAGED:
            table = torch.tensor([[5, 0, 7], [1, 6, 3], [8, 2, 9], [4, 10, 11]], dtype=torch.int32)
            keys = tuple(paged(x, totals[1], table) for x in (k, v))
            options["block_table"] = table
        o, lse, *_ = module.flash_attn_varlen_func(ours[0], *keys, *starts, 11, 12, **options, return_attn_probs=True)
    else:
        o, lse, *_ = module.flash_attn_func(*(x.unflatten(0, (2, -1)) for x in ours), **options, return_attn_probs=True)
        o, lse = o.flatten(0, 1), torch.cat([*lse], 1)
    near(o[rows], wanted[0])
    near(lse[:, rows], wanted[1])
    if lengths is PAGED:
        return
    found = torch.autograd.grad(o[rows], ours, do[rows].to(device, o.dtype))
    for x, y in zip(found, torch.autograd.grad(wanted[0], given, do[rows].double()), strict=True):
        near(x, y.double())


AXES: dict[str, list[Any]] = {  # of a step over a cache
    "lengths": [(1, 1), (3, 3), (3, 2), (1, 3)],  # queries and new keys of a sequence, at most
    "new": [None, "as they are", "neox", "interleaved"],  # new keys, and how they are rotated
    "begin": [None, "cache_seqlens", "others"],  # rotary_seqlens
    "local": [{}, {"causal": True}, {"window_size": (3, 2)}],
    "softcap": [0.0, 3.0],
    "function": [{}, {"alibi_slopes": SLOPES[:3]}, {"attention_chunk": 5}],
    "page_size": [None, 4],
    "leftpad": [False, True],
    "batch_idx": [False, True],
    "ragged": [False, True],
}


def covering(axes: dict[str, list[Any]]) -> list[dict[str, Any]]:
    """Cases of which one has each three values, of three axes, that a function takes."""
    draw, cases, bits = random.Random(0), list[dict[str, Any]](), dict[Any, int]()
    drawn = [{name: draw.randrange(len(values)) for name, values in axes.items()} for _ in range(1500)]
    drawn = [x for x in drawn if not (x["function"] == 1 and (x["ragged"] or x["begin"])) and not (x["new"] < 2 and x["begin"])]
    triples = [sum(1 << bits.setdefault(y, len(bits)) for y in itertools.combinations(x.items(), 3)) for x in drawn]
    left = (1 << len(bits)) - 1
    while left:
        best = max(range(len(drawn)), key=lambda i: (triples[i] & left).bit_count())
        left &= ~triples[best]
        cases.append({name: axes[name][i] for name, i in drawn[best].items()})
    return cases


def turned(x: Any, cos: Any, sin: Any, at: Any, interleaved: bool) -> Any:
    """x, (rows, heads, head_dim), rotated by these positions."""
    cos, sin, n = cos[at][:, None], sin[at][:, None], 2 * cos.shape[1]
    a, b = (x[..., :n:2], x[..., 1:n:2]) if interleaved else (x[..., : n // 2], x[..., n // 2 : n])
    first, second = a * cos - b * sin, a * sin + b * cos
    pair = torch.stack([first, second], -1).flatten(-2) if interleaved else torch.cat([first, second], -1)
    return torch.cat([pair, x[..., n:]], -1)


class Step:
    """A step of three sequences in a cache, and what it gives by its definition."""

    def __init__(self, case: dict[str, Any], device: str = "cpu") -> None:
        self.case, (q_len, new_len), draw, self.device = case, case["lengths"], torch.Generator().manual_seed(2), device
        self.ragged, self.rotary = case["ragged"], {"interleaved": True, "neox": False}.get(case["new"])
        randn = lambda *shape: torch.randn(shape, generator=draw).to(DTYPES[device]).float()  # noqa: E731
        self.lens = [7, 3 if "alibi_slopes" in case["function"] or not case["new"] else 0, 12]
        self.q = [randn(q_len - (self.ragged and q_len > 1 and i == 1), 4, 32) for i in range(3)]
        self.new = [randn(new_len - (self.ragged and new_len > 1 and i == 2), 2, 2, 32) for i in range(3)]
        self.rows = [4, 0, 3] if case["batch_idx"] else [0, 1, 2]
        self.dense = randn(5 if case["batch_idx"] else 3, 16, 2, 2, 32)
        self.first = [min(n, 2) for n in self.lens] if case["leftpad"] else [0] * 3
        angles = 6 * torch.rand((16, 8), generator=draw)
        self.angles, self.begin = (angles.cos(), angles.sin()), self.lens if case["begin"] != "others" else [2, 5, 1]
        self.pools, self.table, size = [x.clone() for x in self.dense.unbind(2)], None, case["page_size"]
        if size is not None:
            self.table = torch.randperm(len(self.dense) * 16 // size, generator=draw).int().view(len(self.dense), -1)
            paged = torch.empty((self.table.numel(), size, 2, 2, 32))
            paged[self.table.flatten().long()] = self.dense.reshape(-1, size, 2, 2, 32)
            self.pools = [x.clone() for x in paged.unbind(2)]
        self.pools = [x.to(device, DTYPES[device]) for x in self.pools]

    def run(self) -> Any:
        """Returns what the function gives."""
        case, ints, to = self.case, lambda x: torch.tensor(x, dtype=torch.int32, device=self.device), DTYPES[self.device]
        is_3 = self.ragged or case["begin"] or "attention_chunk" in case["function"]
        joined = torch.cat if self.ragged else torch.stack
        given = {"cache_seqlens": ints(self.lens), "softcap": case["softcap"], **case["local"], **case["function"]}
        given |= {name: x.to(self.device) for name, x in given.items() if isinstance(x, torch.Tensor)}
        given |= {"page_table" if is_3 else "block_table": self.table.to(self.device)} if self.table is not None else {}
        given |= {"cache_batch_idx": ints(self.rows)} if case["batch_idx"] else {}
        given |= {"cache_leftpad": ints(self.first)} if case["leftpad"] else {}
        given |= {"cu_seqlens_q": self.starts(self.q), "max_seqlen_q": case["lengths"][0]} if self.ragged else {}
        if case["new"]:
            given |= dict(zip("kv", (x.to(self.device, to) for x in joined(self.new).unbind(-3)), strict=True))
            given |= {"cu_seqlens_k_new": self.starts(self.new)} if self.ragged else {}
        if self.rotary is not None:
            given |= {"rotary_cos": self.angles[0].to(self.device), "rotary_sin": self.angles[1].to(self.device)}
            given |= {"rotary_interleaved": self.rotary}
            given |= {"rotary_seqlens": ints(self.begin)} if case["begin"] == "others" else {}
            given |= {"rotary_seqlens": given["cache_seqlens"]} if case["begin"] == "cache_seqlens" else {}
        function = (fa3 if is_3 else fa2).flash_attn_with_kvcache
        return function(joined(self.q).to(self.device, to), *self.pools, **given, return_softmax_lse=True)

    def starts(self, rows: list[Any]) -> Any:
        return torch.tensor([0, *itertools.accumulate(map(len, rows))], dtype=torch.int32, device=self.device)

    def check(self, o: Any, lse: Any) -> None:
        """Compares results, and what the cache holds then."""
        case, held, results = self.case, self.dense.clone(), []
        options = {**case["local"], **case["function"], "softcap": case["softcap"]}
        slopes = options.pop("alibi_slopes", [None] * 3)
        for i, n in enumerate(self.lens):
            q, new, keys, end = self.q[i], self.new[i].clone(), held[self.rows[i]], n
            if self.rotary is not None:
                moves = bool(case["local"]) or "attention_chunk" in options
                new[:, 0] = turned(new[:, 0], *self.angles, self.begin[i] + torch.arange(len(new)), self.rotary)
                q = turned(q, *self.angles, self.begin[i] + torch.arange(len(q)) * moves, self.rotary)
            if case["new"]:
                end = n + len(new)
                keys[n:end] = new
            results.append(formula(q, *keys[:end].unbind(1), first=self.first[i], slopes=slopes[i], **options))
        near(o if self.ragged else o.flatten(0, 1), torch.cat([x for x, _ in results]))
        near(lse if self.ragged else torch.cat([*lse], 1), torch.cat([x for _, x in results], 1))
        found = torch.stack(self.pools, 2)
        near(found if self.table is None else found[self.table.long()].flatten(1, 2), held.double())


CASES = covering(AXES)


@pytest.mark.parametrize(
    ("case", "device"),
    [(x, "cpu") for x in CASES] + [pytest.param(x, "cuda", marks=ON_GPU) for x in CASES[::3]],
    ids=lambda x: x if isinstance(x, str) else "-".join(str(y.index(x[name])) for name, y in AXES.items()),
)
def test_a_step_over_a_cache(case: dict[str, Any], device: str) -> None:
    step = Step(case, device)
    step.check(*step.run())


def test_rotation_apart_beside_eight_bits() -> None:
    """It gives what rotating before the call gives: new keys divided by their scale, and queries, which are not causal."""
    step = Step({**{name: values[0] for name, values in AXES.items()}, "lengths": (3, 1), "new": "neox"})
    pools = [x.to(torch.float8_e4m3fn) for x in step.pools]
    scales = {"k_descale": torch.tensor([[0.5, 1.0]]), "v_descale": torch.tensor([[1.0, 2.0]])}
    q, (k, v) = torch.stack(step.q), (x.contiguous() for x in torch.stack(step.new).unbind(2))
    given, results = {"cache_seqlens": torch.tensor(step.lens, dtype=torch.int32), **scales}, []
    for is_before in (False, True):
        own, held = (
            {"rotary_cos": step.angles[0], "rotary_sin": step.angles[1], "rotary_interleaved": False},
            [x.clone() for x in pools],
        )
        if is_before:
            places = [torch.full((len(x),), n) for x, n in zip(step.q, step.lens, strict=True)]
            q = torch.stack([turned(x, *step.angles, at, False) for x, at in zip(q, places, strict=True)])
            k, own = torch.stack([turned(x, *step.angles, at[:1], False) for x, at in zip(k, places, strict=True)]), {}
        results.append((fa3.flash_attn_with_kvcache(q, *held, k, v, **given, **own), held))
    assert all(torch.equal(x.float(), y.float()) for x, y in zip(results[0][1], results[1][1], strict=True))
    near(results[0][0], results[1][0].double())
