"""The examples at a tiny size: they check what they compute."""

from __future__ import annotations

import importlib.util
import json
import math
import pathlib
import sys
import time
from typing import Any

import numpy as np
import pytest

from rawattn import trace
from rawattn.variant.function import option_of

torch = pytest.importorskip("torch")
pytestmark = pytest.mark.usefixtures("one_thread")
EXAMPLES = pathlib.Path(__file__).resolve().parents[2] / "examples"


def example(name: str) -> Any:
    if str(EXAMPLES) not in sys.path:
        sys.path.append(str(EXAMPLES))  # they import each other
    spec = importlib.util.spec_from_file_location(name, EXAMPLES / f"{name}.py")
    assert spec is not None and spec.loader is not None
    module = sys.modules[name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize("window", [[], ["--window", "20"]])
def test_generate(window: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    """More requests than pages for all of them at once, prompts in parts, and pages that are given back."""
    sizes = ["--requests", "5", "--tokens", "4", "--prompt", "50", "--pages", "12", "--page-size", "8", "--rows", "40"]
    requests = example("generate").main([*sizes, *window])
    assert all(len(request.times) == 4 for request in requests)
    assert "20 tokens of 5 requests" in capsys.readouterr().out


def test_deepseek(capsys: pytest.CaptureFixture[str]) -> None:
    """The tokens are transformers' own, and would not be with another rotation."""
    pytest.importorskip("transformers", "5.0")
    deepseek = example("deepseek")
    sizes = ["--requests", "2", "--tokens", "4", "--prompt", "20"]
    deepseek.main(sizes)
    assert "8 of 8 tokens of 2 requests" in capsys.readouterr().out
    attend = deepseek.Server.attend

    def without_rotary(self: Any, i: int, x: Any, step: Any) -> Any:
        self.rotary = None
        return attend(self, i, x, step)

    deepseek.Server.attend = without_rotary
    with pytest.raises(SystemExit, match="tokens differ"):
        deepseek.main(sizes)


def test_generate_is_checked() -> None:
    generate, shape = example("generate"), example("llama").Shape(layers=1)
    model = generate.Model(shape, shape.random(), "cpu", generate.torch.float32)
    request = generate.Request([1, 2, 3], 2, 1)
    best = int(generate.eager(model, [1, 2], None)[-1].argmax())
    generate.check(model, generate.Request([1, 2, best], 2, 1), None, 1e-3)
    if best != 3:
        with pytest.raises(SystemExit, match="is behind the likeliest one"):
            generate.check(model, request, None, 1e-3)


def test_generate_gives_pages_back_early() -> None:
    """A window's pages go to others while a request still runs."""
    generate, shape = example("generate"), example("llama").Shape(layers=1)
    model = generate.Model(shape, shape.random(), "cpu", torch.float32)
    server = generate.Server(model, 8, 4, 16, 32, 6)
    requests, running = [generate.Request([*range(20)], 20, 12), generate.Request([5, 6, 7], 3, 4)], set[int]()
    server.waiting.extend(requests)
    while server.waiting or server.running:
        server.step()
        running.add(len(server.running))
        for request in server.running:
            assert request.pages.count(-1) == request.freed == max(0, (request.cached + 1 - 6) // 4)
    assert len(server.free) == 8 and 2 in running, "the first request takes all pages at its beginning"
    for request in requests:
        generate.check(model, request, 6, 1e-3)
    assert server.graph(3) is server.graph(4) and server.graph(4).size == 4 and {*server.graphs} == {1, 2, 4}


def test_generate_from_a_folder(tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A model that transformers saved, beside transformers' own generate."""
    transformers, llama = pytest.importorskip("transformers"), example("llama")
    config = transformers.LlamaConfig(
        vocab_size=64, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
        rope_parameters={"rope_type": "default", "rope_theta": 500.0}, max_position_embeddings=128, initializer_range=0.5,
    )  # fmt: skip
    transformers.LlamaForCausalLM(config).save_pretrained(tmp_path)
    assert llama.load(tmp_path)[0] == llama.Shape(2, 32, 4, 2, 8, 48, 64, 128, 1e-6, 500.0)
    sizes = ["--requests", "3", "--tokens", "5", "--prompt", "20", "--pages", "20", "--page-size", "4"]
    for window in ([], ["--window", "9"]):
        example("generate").main([*sizes, *window, "--model", str(tmp_path), "--transformers"])
        assert "15 of 15 tokens are those of transformers" in capsys.readouterr().out
    config.rope_parameters = {"rope_type": "linear", "rope_theta": 500.0, "factor": 2.0}
    config.save_pretrained(tmp_path)
    with pytest.raises(SystemExit, match="has biases, or scaled rotary embeddings"):
        llama.load(tmp_path)


def test_train_gpt(tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str]) -> None:
    """It learns a text of nine letters by heart, and writes it."""
    (tmp_path / "text").write_text("once more" * 30)
    sizes = "--layers 1 --width 32 --heads 2 --length 18 --batch 8 --steps 80 --rate 1e-2 --write 18 --device cpu"
    losses = example("train_gpt").main(["--text", str(tmp_path / "text"), *sizes.split()])
    assert losses[0] > math.log(8) - 0.5 and len(losses) == 80 and losses[-1] < 0.1
    printed = capsys.readouterr().out
    assert printed.strip().endswith("once more" * 3) and "loss of 80 steps" in printed
    assert printed.count("●") == 64


def test_the_notebook(capsys: pytest.CaptureFixture[str]) -> None:
    """Its cells run one after the other within its minute on a CPU, and the model learns; no result is kept in the file."""
    cells = [cell for cell in json.loads((EXAMPLES / "train_gpt.ipynb").read_text())["cells"] if cell["cell_type"] == "code"]
    values: dict[str, Any] = {"__name__": "__main__"}
    begin = time.process_time()
    for cell in cells:
        assert cell["outputs"] == [] and cell["execution_count"] is None
        exec(compile("".join(cell["source"]), "train_gpt.ipynb", "exec"), values)
    assert time.process_time() - begin < 60
    assert values["losses"][0] > 3 and values["losses"][-1] < 2.5 and len(values["losses"]) == 120
    assert "step 119" in capsys.readouterr().out and torch.allclose(values["ours"], values["theirs"], atol=1e-4)


def test_it_sees_nothing_of_the_future() -> None:
    torch.manual_seed(0)
    model, tokens = example("train_gpt").GPT(9, 24, 2, 32, 4), torch.randint(9, (1, 24))
    logits = model(tokens)
    tokens[0, 12] = (tokens[0, 12] + 1) % 9
    same = (model(tokens) == logits).all(-1)[0]
    assert same[:12].all() and not same[12:].any()


def test_curve() -> None:
    drawn = example("train_gpt").curve([4.0, 4.0, 3.0, 2.0], columns=4, rows=3).splitlines()
    assert drawn == ["  4.00 │●●  ", "       │  ● ", "  2.00 │   ●", "       └────", "        loss of 4 steps"]
    assert example("train_gpt").curve([1.0] * 200).count("●") == 64


@pytest.mark.parametrize("fault", ["", "causal", "scale", "empty"])
def test_fuzz_kernel(fault: str, capsys: pytest.CaptureFixture[str]) -> None:
    """It finds each fault, and shrinks it to a case of a few numbers; what is right passes."""
    settings = ["--examples", "2000", "--fault", fault] if fault else ["--examples", "40"]
    found = example("fuzz_kernel").main(["--device", "cpu", *settings])
    assert (found is not None) is bool(fault)
    if found is not None:
        assert found.q_len * found.kv_len <= 4 and found.heads == found.batch == 1
        assert "the smallest case that is wrong: dtype=fp32" in capsys.readouterr().out


def test_attend_cupy(capsys: pytest.CaptureFixture[str]) -> None:
    assert example("attend_cupy").main(["--length", "64"]) < 1e-3
    assert "kernel   " in capsys.readouterr().out


def test_attend_jax() -> None:
    pytest.importorskip("jax")
    losses = example("attend_jax").main(["--steps", "40"])
    assert losses[0] > 1.5 and losses[-1] < 0.1


def test_sparse_video(capsys: pytest.CaptureFixture[str]) -> None:
    """Blocks find those of their object; what learns nothing is said to."""
    video = example("sparse_video")
    losses = video.main(["--device", "cpu", "--heads", "1"])
    assert losses[0] > math.log(video.COLOURS) - 0.3 and len(losses) == 60 and sum(losses[-5:]) < 5 * 0.2
    assert "step   59" in capsys.readouterr().out
    with pytest.raises(SystemExit, match="did not learn"):
        video.main(["--device", "cpu", "--heads", "1", "--steps", "2", "--rate", "0"])


def test_a_video_in_blocks() -> None:
    """A block of 64 tokens is a cube of one object, and the second half shows no colour."""
    video = example("sparse_video")
    torch.manual_seed(0)
    objects, shown, colours = video.draw(3, 8, 12, "cpu")
    assert (objects.view(3, -1, 64) == objects.view(3, -1, 64)[..., :1]).all() and objects.shape == (3, 8 * 144)
    assert (shown.chunk(2, 1)[0] == colours.chunk(2, 1)[0]).all() and (shown.chunk(2, 1)[1] == video.COLOURS).all()
    for clip, seen in zip(objects, colours, strict=True):
        assert all(len(set(seen[clip == i].tolist())) == 1 for i in set(clip.tolist()))
        first, second = (sorted(half.tolist()) for half in clip.chunk(2))
        assert first == second, "each object is still there"
    grid = torch.arange(2 * 4 * 8 * 4).view(2, 4, 8, 4)
    assert video.to_blocks(grid)[1, 64:].tolist() == grid[1, :, 4:].flatten().tolist()


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_evoformer(dtype: str, capsys: pytest.CaptureFixture[str]) -> None:
    """Errors of o and of every gradient; a bias that is not what it was is seen."""
    evoformer, sizes = example("evoformer"), ["--length", "20", "--width", "32", "--device", "cpu", "--dtype", dtype]
    errors = evoformer.main(sizes)
    most = {"float32": 1e-5, "bfloat16": 0.1}[dtype]
    assert max(errors.values()) < most and len(errors) == 24 and "gradient of starting.bias.weight" in errors
    assert capsys.readouterr().out.count("gradient of") == 23
    attend = evoformer.triangle_attention
    evoformer.triangle_attention = lambda q, k, v, bias, mask: attend(q, k, v, bias.mT, mask)
    with pytest.raises(SystemExit, match="differs from the formula"):
        evoformer.main(sizes)


def test_masks(capsys: pytest.CaptureFixture[str]) -> None:
    """Ten masks: no tile that keeps a pair is empty, and none that drops one is full."""
    masks = example("masks")
    found = masks.main(["--length", "320", "--tile", "32", "--device", "cpu"])
    printed = capsys.readouterr().out
    assert len(found) == 10 and printed.count("; error ") == 10 and printed.count("█") > 100
    for name, mask in masks.ten(320, "cpu").items():
        pairs = kept(mask, 320).reshape(10, 32, 10, 32)
        assert not pairs.any((1, 3))[found[name] == masks.EMPTY].any() and pairs.all((1, 3))[found[name] == masks.FULL].all(), (
            name
        )
        assert (found[name] == masks.EMPTY).any(), name


def test_a_picture_of_masks(tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A panel for each mask, with its tiles in three colours, and none as text."""
    pytest.importorskip("matplotlib")
    masks, file = example("masks"), tmp_path / "masks.svg"
    found = masks.main(["--length", "128", "--tile", "32", "--device", "cpu", "--picture", str(file)])
    drawn = file.read_text()
    assert "█" not in capsys.readouterr().out and drawn.count("<image") == len(found) == 10


def kept(mask: Any, n: int) -> Any:
    """The pairs that a mask keeps."""
    traced, arrays, numbers = trace.bind(mask, "mask")
    option = option_of(traced, [(str(x.dtype).rpartition(".")[2], tuple(x.shape)) for x in arrays], numbers, (1, 1, n, n))
    q, kv = np.arange(n)[:, None], np.arange(n)
    if option.keep is None:
        begin, end = option.interval(np.arange(n), n, n)
        return (kv >= begin[:, None]) & (kv < end[:, None])
    return np.broadcast_to(option.keep(np, [x.numpy() for x in arrays], 0, 0, q, kv, n, n), (n, n))
