"""Functions that captured tensors where torch sees operators, on the CPU: torch.compile, export, vmap, autograd, fakes."""

from __future__ import annotations

import copy
import pickle
import subprocess
import sys
import warnings
from collections.abc import Callable
from typing import Any

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("torch._dynamo.testing")

import rawattn  # noqa: E402
from rawattn.errors import ProblemError  # noqa: E402
from rawattn.operation.spec import Options  # noqa: E402
from rawattn.torch import operators, option_text  # noqa: E402
from tests.captures import documents, head_bias  # noqa: E402

pytestmark = pytest.mark.skipif(not hasattr(torch.library, "register_vmap"), reason="torch before 2.5")


def make(n: int = 50, grad: bool = False) -> list[Any]:
    torch.manual_seed(n)
    return [torch.randn(2, n, heads, 16, requires_grad=grad) for heads in (4, 2, 2)]


def ids(n: int, size: int = 13) -> Any:
    return (torch.arange(n) // size).int()


SLOPES = torch.tensor([0.1, -0.2, 0.3, 0.05])


def attention(q: Any, k: Any, v: Any, mask: Any, score: Any) -> Any:
    return rawattn.attention(q, k, v, mask=mask, score=score)


def compiled(function: Any) -> tuple[Any, Any]:
    torch._dynamo.reset()  # graphs of one function are counted, whichever test made them
    counter = torch._dynamo.testing.CompileCounterWithBackend("aot_eager")
    return torch.compile(function, backend=counter, fullgraph=True), counter


def test_compile() -> None:
    """Captured tensors are arguments of the graph: new ones of other lengths take part, and gradients flow past them."""
    step, counter = compiled(attention)
    score = rawattn.score.function(lambda s, h, q, kv: s + SLOPES[h] * (kv - q))
    for n in (50, 61, 70, 80):
        q, k, v = make(n, grad=True)
        mask = documents(ids(n), 7)
        eager, found = attention(q, k, v, mask, score), step(q, k, v, mask, score)
        assert torch.equal(found, eager)
        for a, b in zip(*(torch.autograd.grad(x.square().sum(), (q, k, v)) for x in (eager, found)), strict=True):
            assert torch.equal(a, b)
    assert counter.frame_count == 2, "the second graph is of any length"
    other = documents(ids(80, 5), 7)
    assert torch.equal(step(q, k, v, other, score), attention(q, k, v, other, score)) and counter.frame_count == 2


READY: dict[str, Callable[[int], Any]] = {
    "Documents": lambda n: rawattn.mask.Documents(ids(40, n), causal=True),
    "documents of each sequence": lambda n: rawattn.mask.Documents(ids(80, n).view(2, 40)),
    "Prefix": lambda n: rawattn.mask.Prefix(torch.tensor([n, 7], dtype=torch.int32)),
    "Tree": lambda n: rawattn.mask.Tree(torch.eye(40, dtype=torch.bool) | (torch.arange(40) < n)),
    "Tree.from_words": lambda n: rawattn.mask.Tree.from_words(torch.full((40, 2), n, dtype=torch.int32)),
    "Chunked": rawattn.mask.Chunked,
    "Neighbourhood": lambda n: rawattn.mask.Neighbourhood((5, 8), (3, 2 * n - 5)),
    "BlockTable": lambda n: rawattn.mask.BlockTable(torch.ones(1, 4, 5, 5).tril(n - 5).bool(), 8),
}


@pytest.mark.parametrize("name", READY)
def test_compile_ready_made(name: str) -> None:
    """A ready-made mask from outside is taken as it is, from a closure or as an argument, whose tensors are the graph's."""
    q, k, v = make(40)
    mask, other = READY[name](5), READY[name](4)
    step, _ = compiled(lambda q: rawattn.attention(q, q, q, mask=mask))
    assert torch.equal(step(q), rawattn.attention(q, q, q, mask=mask))
    step, counter = compiled(attention)
    for each in (mask, other):
        assert torch.equal(step(q, k, v, each, None), attention(q, k, v, each, None))
    assert counter.frame_count == (1 if any(isinstance(x, torch.Tensor) for x in vars(mask).values()) else 2)
    assert not torch.equal(step(q, k, v, mask, None), step(q, k, v, other, None))


def test_compile_other_numbers() -> None:
    """Of one function, in graphs that are made one after the other."""
    q, k, v = make(40)
    step, counter = compiled(attention)
    for size in (5, 4, 7):
        mask = rawattn.mask.function(lambda q, kv, size=size: q // size == kv // size)
        assert torch.equal(step(q, k, v, mask, None), attention(q, k, v, mask, None))
    assert counter.frame_count == 3


def test_ready_made_masks_do_not_change() -> None:
    mask = rawattn.mask.Documents(ids(40))
    with pytest.raises(ProblemError, match="ids of a Documents was assigned to; it is as it was made: make another"):
        mask.ids = ids(40, 5)
    again = copy.deepcopy(mask)
    again.ids.zero_()
    q, k, v = make(40)
    whole = attention(q, k, v, None, None)
    for each, same in ((again, True), (mask, False)):
        assert torch.allclose(attention(q, k, v, each, None), whole, atol=1e-6) is same


def test_compile_bias() -> None:
    """alibi and bias need nothing to be made outside."""
    step, counter = compiled(lambda q, k, v, bias: rawattn.attention(q, k, v, bias=bias, alibi=SLOPES, softcap=4.0))
    for n in (50, 45, 40):
        q, k, v = make(n)
        bias = torch.randn(2, 1, n, n)
        assert torch.equal(step(q, k, v, bias), rawattn.attention(q, k, v, bias=bias, alibi=SLOPES, softcap=4.0))
    assert counter.frame_count == 2


def test_compile_checks_sizes() -> None:
    step, _ = compiled(lambda q, k, v, alibi: rawattn.attention(q, k, v, alibi=alibi))
    with pytest.raises(Exception, match=r"alibi has shape .*3.*; it must be .*4.*, \(heads\)"):
        step(*make(40), torch.ones(3))
    step, _ = compiled(attention)
    with pytest.raises(Exception, match=r"ids has shape .* it must be .*\(length\)"):
        step(*make(40), rawattn.mask.Documents(ids(10)), None)


INSIDE: dict[str, tuple[Any, bool]] = {  # a call of q and ids, and whether a whole graph takes it
    "a lambda": (lambda q, x: rawattn.attention(q, q, q, mask=lambda q, kv: (q + kv) % 3 == 0), False),
    "a tensor": (lambda q, x: rawattn.attention(q, q, q, mask=lambda q, kv: x[q] == x[kv]), False),
    "what a mask says": (lambda q, x: rawattn.attention(q, q, q, mask=lambda q, kv: q >= kv), False),
    "function": (lambda q, x: rawattn.attention(q, q, q, mask=rawattn.mask.function(lambda q, kv: x[q] == x[kv])), False),
    "Documents": (lambda q, x: rawattn.attention(q, q, q, mask=rawattn.mask.Documents(x)), False),
    "a score": (lambda q, x: rawattn.attention(q, q, q, score=lambda s, h: s * SLOPES[h]), False),
    "Window": (lambda q, x: rawattn.attention(q, q, q, mask=rawattn.mask.Window(3, 0)), True),
    "alibi": (lambda q, x: rawattn.attention(q, q, q, alibi=SLOPES), True),
}


@pytest.mark.parametrize(("step", "is_taken"), INSIDE.values(), ids=INSIDE)
def test_what_is_made_inside_of_what_is_compiled(step: Any, is_taken: bool) -> None:
    """A whole graph holds no Python function, and the error says what to write; where graphs may break, the call is an eager
    one."""
    for n in (50, 41):
        (q, *_), x = make(n), ids(n)
        torch._dynamo.reset()
        assert torch.equal(torch.compile(step, backend="eager")(q, x), step(q, x))
        torch._dynamo.reset()  # else the frame is skipped
        if is_taken:
            assert torch.equal(torch.compile(step, backend="eager", fullgraph=True)(q, x), step(q, x))
        else:
            with pytest.raises(Exception, match=r"make rawattn\.(mask|score)\.function\(f\) outside of what is compiled"):
                torch.compile(step, backend="eager", fullgraph=True)(q, x)


@pytest.mark.parametrize(
    ("options", "outcome"),
    [
        ("bias=torch.zeros(4, 4)", "None"),
        ("alibi=torch.zeros(2)", "None"),
        ("mask=lambda q, kv: q >= kv + 1", "'make rawattn.mask.function(f) outside of what is compiled'"),
    ],
)  # fmt: skip
def test_a_compiled_call_is_the_first_since_torch_was_imported(options: str, outcome: str) -> None:
    code = (
        "import sys, rawattn; early = 'torch' in sys.modules; import torch\n"
        "if early: sys.exit()\n"
        f"f, words = lambda q: rawattn.attention(q, q, q, {options}), {outcome}\n"
        "run, q, told = torch.compile(f, backend='eager', fullgraph=True), torch.randn(1, 4, 2, 8), ''\n"
        "try: found = run(q)\n"
        "except Exception as error: told = str(error)\n"
        "assert words in told if words else torch.equal(found, f(q)), told\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_pickles() -> None:
    """By the expression, with the arrays: a lambda's are made where its module is not."""
    q, k, v = make()
    doc, window = ids(50), 7
    for options in (
        {"mask": rawattn.mask.function(lambda q, kv: (doc[q] == doc[kv]) & (q - kv < window))},
        {"mask": rawattn.mask.function(rawattn.mask.Documents(doc))},
        {"score": rawattn.score.function(lambda s, h: s * SLOPES[h])},
    ):
        ((role, own),) = options.items()
        for copied in (pickle.loads(pickle.dumps(own)), copy.deepcopy(own)):
            assert copied.function == own.function and repr(copied) == repr(own)
            assert torch.equal(rawattn.attention(q, k, v, **{role: copied}), rawattn.attention(q, k, v, **options))
            if role == "mask":
                assert copied.arrays[0] is not doc and torch.equal(copied.arrays[0], doc)
        assert copy.copy(own).arrays[0] is own.arrays[0]


def test_the_operator() -> None:
    q, k, v = make()
    mask, score = documents(ids(50), 7), head_bias(SLOPES)
    text = option_text.text_of(Options(mask=mask.function, score=score.function)._asdict())
    given = (q, k, v, None, None, None, None, None, text, None, [ids(50), SLOPES])
    torch.library.opcheck(torch.ops.rawattn.attention.default, given)
    assert torch.equal(torch.ops.rawattn.attention(*given)[0], attention(q, k, v, mask, score))
    with pytest.raises(ProblemError, match="captured has 1 tensors; the functions in spec captured 2"):
        operators._fake_attention(*given[:-1], [SLOPES])
    with pytest.raises(ProblemError, match=r"doc, which mask captured, is a torch torch\.complex64 array"):
        operators._fake_attention(*given[:-1], [ids(50).to(torch.complex64), SLOPES])


def test_export() -> None:
    q, k, v = make()
    mask, score = documents(ids(50), 7), head_bias(SLOPES)

    class Layer(torch.nn.Module):
        def forward(self, q: Any, k: Any, v: Any) -> Any:
            return attention(q, k, v, mask, score)

    program = torch.export.export(Layer(), (q, k, v))
    assert torch.equal(program.module()(q, k, v), attention(q, k, v, mask, score))


EXPORTED: dict[str, tuple[Any, Any, tuple[int, ...], bool]] = {  # of what they make, its axes, and whether strict export takes it
    "bias": (lambda x: {"bias": x}, lambda n: torch.randn(n, n), (0, 1), True),
    "alibi": (lambda x: {"alibi": x}, lambda n: SLOPES, (), True),
    "softcap, alibi": (lambda x: {"softcap": 2.0, "alibi": x}, lambda n: SLOPES, (), True),
    "a lambda": (lambda x: {"mask": lambda q, kv: x[q] == x[kv]}, ids, (0,), False),
    "made inside": (lambda x: {"mask": rawattn.mask.function(lambda q, kv: x[q] == x[kv])}, ids, (0,), False),
    "Documents": (lambda x: {"mask": rawattn.mask.Documents(x)}, ids, (0,), False),
}


class Exported(torch.nn.Module):
    def __init__(self, options: Any) -> None:
        super().__init__()
        self.options = options

    def forward(self, q: Any, k: Any, v: Any, x: Any) -> Any:
        return rawattn.attention(q, k, v, **self.options(x))


@pytest.mark.parametrize("strict", [False, True])
@pytest.mark.parametrize("name", EXPORTED)
def test_export_of_what_is_made_inside(name: str, strict: bool) -> None:
    """Without strict=True, which follows Python by dynamo, functions may be made inside; lengths stay free."""
    options, new, axes, is_strict = EXPORTED[name]
    layer, length = Exported(options), torch.export.Dim("length", min=2, max=4096)
    shapes = {**{each: {1: length} for each in "qkv"}, "x": dict.fromkeys(axes, length)}
    given = (*make(50), new(50))
    if strict and not is_strict:
        with pytest.raises(Exception, match=r"make rawattn\.mask\.function\(f\) outside of what is compiled"):
            torch.export.export(layer, given, dynamic_shapes=shapes, strict=True)
        return
    program, given = torch.export.export(layer, given, dynamic_shapes=shapes, strict=strict), (*make(33), new(33))
    assert torch.equal(program.module()(*given), layer(*given))


def test_vmap() -> None:
    """A mapped dimension is no batch for a function: each element is computed by itself."""
    stacked, docs = [torch.stack([x, 2 * x]) for x in make()], torch.stack([ids(50), ids(50, 7)])
    reach = torch.tensor([3, 40]).int()

    def f(q: Any, k: Any, v: Any, doc: Any) -> Any:
        return rawattn.attention(q, k, v, mask=rawattn.mask.function(lambda b, q, kv: (doc[q] == doc[kv]) & (q - kv <= reach[b])))

    found = torch.vmap(f)(*stacked, docs)
    assert torch.equal(found, torch.stack([f(*(x[i] for x in stacked), docs[i]) for i in range(2)]))
    assert torch.equal(
        torch.vmap(f, in_dims=(0, 0, 0, None))(*stacked, docs[0]),
        torch.stack([f(*(x[i] for x in stacked), docs[0]) for i in range(2)]),
    )


def test_gradients() -> None:
    """By autograd as by attention_backward."""
    q, k, v = make(grad=True)
    mask, score = documents(ids(50), 7), head_bias(SLOPES)
    o, lse = rawattn.attention(q, k, v, mask=mask, score=score, return_lse=True)
    found = torch.autograd.grad(o.square().sum() + lse.sum(), (q, k, v))
    with torch.no_grad():
        do, dlse = 2 * o, torch.ones_like(lse)
        wanted = rawattn.attention_backward(do, q, k, v, o, lse, dlse=dlse, mask=mask, score=score)
    assert all(torch.equal(a, b) for a, b in zip(found, wanted, strict=True))
    slopes = SLOPES.clone().requires_grad_()
    with torch.no_grad():
        rawattn.attention(q, k, v, score=head_bias(slopes))


def test_gradients_of_captured_tensors() -> None:
    """The same where torch sees an operator: compiled, under transforms, where autocast casts, with create_graph=True."""
    q, k, v = make(grad=True)
    slopes, bias = SLOPES.clone().requires_grad_(), torch.randn(4, 50, 50, requires_grad=True)
    leaves = (q, k, v, slopes, bias)

    def plain(s: Any, b: Any, h: Any, q: Any, kv: Any) -> Any:
        return s * slopes[h] + bias[h, q, kv]

    def loss(q: Any, k: Any, v: Any, score: Any = plain) -> Any:
        return rawattn.attention(q, k, v, causal=True, score=score).float().square().sum()

    wanted = torch.autograd.grad(loss(q, k, v), leaves)
    step, counter = compiled(loss)
    for found in (
        torch.autograd.grad(step(q, k, v, rawattn.score.function(plain)), leaves),
        torch.autograd.grad(loss(q, k, v), leaves, create_graph=True),
        torch.func.grad(lambda slopes: loss(q, k, v, lambda s, b, h, q, kv: s * slopes[h] + bias[h, q, kv]))(slopes),
    ):
        assert counter.frame_count == 1
        for a, b in zip(found, wanted if len(found) == 5 else wanted[3], strict=True):
            assert torch.equal(a, b)
    with pytest.raises(ProblemError, match="a second derivative was asked for"):
        torch.autograd.grad(torch.autograd.grad(loss(q, k, v), slopes, create_graph=True)[0].sum(), slopes)
    with torch.autocast("cpu", torch.bfloat16):
        cast = loss(q, k, v)
    for a, b in zip(torch.autograd.grad(cast, leaves), wanted, strict=True):
        assert a.dtype == torch.float32
        torch.testing.assert_close(a, b, rtol=0.1, atol=0.2)
    o = rawattn.attention(q, k, v, score=plain)
    with pytest.raises(ProblemError, match="is_grads_batched=True was given, and a captured tensor requires grad"):
        torch.autograd.grad(o, slopes, torch.stack([o.detach()] * 2), is_grads_batched=True)


def test_gradients_of_captured_tensors_under_vmap() -> None:
    q, k, v = make(20)
    every, queries = torch.randn(3, 4), torch.randn(3, *q.shape)

    def loss(slopes: Any, q: Any) -> Any:
        return rawattn.attention(q, k, v, score=rawattn.score.function(lambda s, h: s * slopes[h])).square().sum()

    wanted = torch.stack([torch.func.grad(loss)(every[i], queries[i]) for i in range(3)])
    assert torch.equal(torch.func.vmap(torch.func.grad(loss))(every, queries), wanted)
    assert torch.equal(torch.func.grad(lambda x: torch.func.vmap(loss)(x, queries).sum())(every), wanted)


def test_the_operator_of_gradients() -> None:
    q, k, v = make()
    score, lse = head_bias(SLOPES), torch.zeros(2, 4, 50)
    text = option_text.text_of(Options(score=score.function)._asdict())
    lens = torch.tensor([50, 7], dtype=torch.int32)
    given = (q, q, k, v, q, lse, None, None, None, None, None, None, text, None, [SLOPES], lens, None, None, None, [0])
    torch.library.opcheck(torch.ops.rawattn.attention_backward_captured.default, given)


def test_flops_and_fakes() -> None:
    from torch._subclasses.fake_tensor import FakeTensorMode
    from torch.utils.flop_counter import FlopCounterMode

    q, k, v = make()
    mask = documents(ids(50), 7)
    with FlopCounterMode(display=False) as counted:
        rawattn.attention(q, k, v, mask=mask)
    assert counted.get_total_flops() == 4 * 2 * 4 * 50 * 50 * 16, "of all pairs"
    with FakeTensorMode() as mode:
        fakes = [mode.from_tensor(x) for x in (q, k, v)]
        doc = mode.from_tensor(ids(50))
        assert rawattn.attention(*fakes, mask=documents(doc)).shape == q.shape


def test_block_mask() -> None:
    flex = pytest.importorskip("torch.nn.attention.flex_attention")
    n = 300
    q, k, v = make(n)
    doc = ids(n, 70)
    f = lambda b, h, q, kv: (doc[q] == doc[kv]) & (q >= kv)  # noqa: E731
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        mask = flex.create_block_mask(f, 2, 4, n, n, device="cpu", BLOCK_SIZE=64)
    assert torch.equal(rawattn.attention(q, k, v, mask=mask), rawattn.attention(q, k, v, mask=f))
    counts, indices = torch.tensor([[[1, 2, 1]]]).int(), torch.tensor([[[[0, 1, 2], [2, 0, 1], [1, 0, 2]]]]).int()
    mask = flex.BlockMask.from_kv_blocks(counts, indices, BLOCK_SIZE=(100, 100))
    table = mask.to_dense().bool()
    assert torch.equal(
        rawattn.attention(q, k, v, mask=mask), rawattn.attention(q, k, v, mask=rawattn.mask.BlockTable(table, 100))
    )
    with pytest.raises(ProblemError, match=r"BlockMask has shape \(1, 1, 300, 300\); it must be \(2, 4, 290, 290\)"):
        rawattn.attention(*make(290), mask=mask)


def test_a_block_mask_that_was_edited() -> None:
    flex = pytest.importorskip("torch.nn.attention.flex_attention")
    q, k, v = make(200)
    counts, indices = torch.ones(1, 1, 2, dtype=torch.int32), torch.zeros(1, 1, 2, 2, dtype=torch.int32)
    mask = flex.BlockMask.from_kv_blocks(counts, indices, BLOCK_SIZE=100, seq_lengths=(200, 200))
    before = rawattn.attention(q, k, v, mask=mask)
    assert torch.equal(before, rawattn.attention(q, k, v, mask=mask)) and before.any()
    mask.kv_num_blocks.zero_()
    assert not rawattn.attention(q, k, v, mask=mask).any()
