"""config.cuh of the backward kernels, for tests: the constants, fields and choices that each of them takes."""

from __future__ import annotations

import dataclasses
from typing import Any, ClassVar

from rawattn import render
from rawattn.compiler import Source
from rawattn.operation import Forward
from rawattn.program import Field, Fields
from rawattn.spec import Spec
from rawattn.variant import Option, launch, rows, scheduler, weight
from rawattn.variant.element import BF16
from rawattn.variant.mask import Causal, Full, Mask, Window
from rawattn.variant.score import Scale, Score, Softcap

SMEM_BYTES = 232_448


@dataclasses.dataclass(frozen=True)
class Choice(Option):
    """An option by its C++ name, its files and fields."""

    type_: str
    files: tuple[str, ...]
    given: Fields = ()
    type: ClassVar[str] = ""

    @property
    def cuda_type(self) -> str:
        return self.type_

    @property
    def sources(self) -> tuple[str, ...]:
        return self.files

    @property
    def fields(self) -> Fields:
        return self.given


ZERO_DLSE = Choice("ZeroDlse", ("variant/dlse/zero.cuh",))
GIVEN_DLSE = Choice("GivenDlse", ("variant/dlse/given.cuh",), (Field("dlse", "const Number*"),))
DQ = Field("dq", "StridedOutput")
SUM, TURNS = Field("dq_sum", "float*"), Field("turns", "i32*")
STORES = {
    "ordered": Choice("DqOrdered", ("variant/store/dq_ordered.cuh",), (SUM, TURNS)),
    "final": Choice("DqOrderedFinal", ("variant/store/dq_ordered_final.cuh",), (SUM, TURNS)),
    "unordered": Choice("DqUnordered", ("variant/store/dq_unordered.cuh",), (SUM,)),
}
CLEARS = {
    "ordered": Choice("ClearTurns", ("variant/clear/turns.cuh",), (TURNS,)),
    "final": Choice("ClearTurnsDq", ("variant/clear/turns_dq.cuh",), (TURNS, DQ)),
    "unordered": Choice("ClearDqSum", ("variant/clear/dq_sum.cuh",), (SUM,)),
    "pair": Choice("ClearNothing", ("variant/clear/nothing.cuh",)),
}
DIRECTIONS = {name: f"variant/scheduler/{file}.cuh" for name, file in (
    ("Ascending", "ascending"), ("Alternating", "alternating"), ("LongestFirst", "longest_first"))}  # fmt: skip


def kv_scheduler(op: Forward, direction: str = "", persistent: bool = True) -> Option:
    """The schedule of key tiles."""
    direction = direction or ("Ascending" if isinstance(op.mask, Full) else "Alternating")
    numbers = ("DynamicPersistent", "dynamic_persistent") if persistent else ("SingleTile", "single_tile")
    name, file = ("KvVarlenScheduler", "kv_lpt_varlen") if op.varlen else ("KvScheduler", "kv_lpt")
    dense = () if op.varlen else tuple(Field(name, "i32") for name in ("kv_tiles", "l2_head_group", "last_group"))
    counter = (Field("counter", "i32*"),) if persistent else ()
    files = (DIRECTIONS[direction], f"variant/scheduler/{numbers[1]}.cuh", f"variant/scheduler/{file}.cuh")
    return Choice(f"{name}<{numbers[0]}, {direction}>", files, (*counter, Field("batches", "i32"), *dense))


def q_scheduler(op: Forward, persistent: bool = False) -> Option:
    """The schedule of query tiles."""
    return scheduler.LptVarlenScheduler(persistent) if op.varlen else scheduler.LptScheduler(persistent)


@dataclasses.dataclass(frozen=True)
class Config:
    """A configuration of attn_bwd.cu."""

    consumers: int = 2
    tile_q: int = 64
    dq_parts: int = 1
    dq_columns: int = 128
    dq_chains: int = 1
    dq_stages: int = 2
    registers: tuple[int, int] = (40, 232)

    @property
    def tile_kv(self) -> int:
        return 64 * self.consumers


def panels(columns: int) -> int:
    return -(-columns // 64)


def config_of(op: Forward, store: str = "ordered") -> Config:
    """The configuration of attn_bwd.cu for the head sizes. Three warpgroups have no register to spare for a cap under a window,
    nor to make dq themselves. A producer that loads for windows spills with fewer registers than here."""
    widest = max(op.head_dim, op.head_dim_v)
    assert widest <= 128
    tight = store == "final" or (isinstance(op.score, Softcap) and not isinstance(op.mask, (Full, Causal)))
    if widest <= (56 if tight else 64):
        return Config(consumers=3, dq_columns=op.head_dim, registers=(56, 152) if widest <= 56 else (32, 160))
    if op.head_dim > 112:
        window = isinstance(op.mask, Window) and isinstance(op.score, Scale) and widest > 120
        return Config(dq_parts=2, dq_columns=64, registers=(56, 224) if window else (40, 232))
    return Config(dq_columns=op.head_dim)


def choices(op: Forward, fast: bool = True) -> dict[str, Option]:
    """What all kernels choose. The score of tensor cores is as exact as float32 is."""
    score = op.score.constant_time if fast and isinstance(op.score, Softcap) else op.score
    where = rows.Varlen() if op.varlen else rows.Dense()
    return {"Element": op.element, "Rows": where, "Mask": op.mask, "Score": score}  # type: ignore[dict-item]


def finish(file: str, constants: dict[str, int], common: Fields, products: list[str], every: dict[str, Option]) -> Source:
    """The source of a kernel; each field once, in order."""
    fields = tuple(dict.fromkeys((*common, *(field for choice in every.values() for field in choice.fields))))
    return render.source(file, render.config_header({"m_tiles_per_warp": 1, **constants}, fields, products, every), "sm_90a")


def fields_of(source: Source) -> Fields:
    """The fields of a source's Args, in order: (name, C++ type)."""
    body = dict(source.headers)["config.cuh"].split("struct Args {\n")[1].split("};")[0]
    return tuple(Field(name.rstrip(";"), ctype.strip()) for ctype, name in (line.rsplit(" ", 1) for line in body.splitlines()))


HEADS: Fields = (Field("scale", "Number"), *(Field(name, "i32") for name in ("heads", "heads_per_kv", "q_blocks")))
STATISTICS: Fields = (Field("lse_log2", "const Number*"), Field("delta", "const Number*"))


def attn_bwd(op: Forward, config: Config, store: str = "ordered", direction: str = "", persistent: bool = True) -> Source:
    d, dv, element = op.head_dim, op.head_dim_v, op.element
    constants = {**dataclasses.asdict(config), "tile_kv": config.tile_kv, "head_dim": d, "head_dim_v": dv}
    constants["q_block"] = config.tile_q
    constants["producer_registers"], constants["consumer_registers"] = constants.pop("registers")
    products = [
        render.wgmma("SMma", element, config.tile_q, a_in_registers=False, b_by_rows=False, negate=op.scale < 0),
        render.wgmma("DpMma", element, config.tile_q, a_in_registers=False, b_by_rows=False),
        render.wgmma("DvMma", element, dv, a_in_registers=True, b_by_rows=True),
        render.wgmma("DkMma", element, d, a_in_registers=True, b_by_rows=True),
        render.wgmma("DqMma", element, config.dq_columns, a_in_registers=False, b_by_rows=True),
    ]
    tensors = (
        *(Field(name, "TmaTensor") for name in ("q", "k", "v", "d_o")),
        *(Field(name, "StridedOutput") for name in ("dk", "dv")),
        DQ,
    )
    every = choices(op) | {
        "Weight": weight.Identity(), "Scheduler": kv_scheduler(op, direction, persistent), "Store": STORES[store],
    }  # fmt: skip
    return finish("attn_bwd.cu", constants, (*tensors, *STATISTICS, *HEADS), products, every)


def attn_bwd_delta(op: Forward, config: Config, store: str = "ordered", dlse: bool = False,
                   aligned: bool = True, arch: str = "sm_90a") -> Source:  # fmt: skip
    size = op.element.itemsize
    vector = 16 // size if aligned else 1
    lanes = min(32, 1 << (-(-op.head_dim_v // vector) - 1).bit_length())
    constants = {
        "tile_q": config.tile_q, "q_block": config.tile_q, "tile_kv": config.tile_kv, "vector": vector,
        "head_dim": op.head_dim, "head_dim_v": op.head_dim_v,
        "lanes": lanes, "threads": min(256, config.tile_q * lanes),
        "dq_chains": config.dq_chains, "dq_parts": config.dq_parts, "dq_columns": config.dq_columns,
    }  # fmt: skip
    every = choices(op)
    every.pop("Score")
    every |= {
        "Dlse": GIVEN_DLSE if dlse else ZERO_DLSE, "Clear": CLEARS[store], "Scheduler": q_scheduler(op),
        "Launch": launch.Dependent() if arch == "sm_90a" else launch.Independent(),
    }  # fmt: skip
    tensors = (Field("o", "StridedTensor"), Field("d_o", "StridedTensor"), Field("lse", "const Number*"))
    out = (Field("lse_log2", "Number*"), Field("delta", "Number*"), Field("heads", "i32"), Field("q_blocks", "i32"))
    source = finish("attn_bwd_delta.cu", constants, (*tensors, *out), [], every)
    return dataclasses.replace(source, arch=arch)


def attn_bwd_convert(op: Forward, config: Config) -> Source:
    parts = config.dq_parts
    constants = {
        "tile_q": config.tile_q, "q_block": config.tile_q, "tile_kv": config.tile_kv, "head_dim": op.head_dim,
        "dq_parts": parts, "dq_columns": config.dq_columns, "threads": 128 * parts, "scale_sign": -1 if op.scale < 0 else 1,
    }  # fmt: skip
    every = choices(op)
    every.pop("Score")
    every["Scheduler"] = q_scheduler(op)
    fields = (DQ, Field("dq_sum", "const float*"), Field("scale", "Number"), Field("heads", "i32"), Field("q_blocks", "i32"))
    return finish("attn_bwd_convert.cu", constants, fields, [], every)


@dataclasses.dataclass(frozen=True)
class PairConfig:
    """A configuration of attn_bwd_dkdv.cu and attn_bwd_dq.cu: of the first, tile_q; of the second, tile_kv and 128 queries."""

    tile_q: int = 64
    tile_kv: int = 64
    q_block: int = 128
    kv_registers: tuple[int, int] = (40, 232)
    q_registers: tuple[int, int] = (40, 232)


def pair_config(op: Forward) -> PairConfig:
    """The configuration for the head sizes: an accumulator of 256 columns takes what the producer can spare."""
    return PairConfig(q_registers=(24, 240) if op.head_dim > 248 else (40, 232))


def pair(op: Forward, config: PairConfig, direction: str = "") -> tuple[Source, Source]:
    """attn_bwd_dkdv.cu and attn_bwd_dq.cu."""
    d, dv, element = op.head_dim, op.head_dim_v, op.element
    common = {"q_block": config.q_block, "consumers": 2, "head_dim": d, "head_dim_v": dv}

    def registers(pair: tuple[int, int]) -> dict[str, int]:
        return dict(zip(("producer_registers", "consumer_registers"), pair, strict=True))

    loads = tuple(Field(name, "TmaTensor") for name in ("q", "k", "v", "d_o"))
    every = choices(op) | {"Weight": weight.Identity()}

    def products(n: int) -> list[str]:
        s = render.wgmma("SMma", element, n, a_in_registers=False, b_by_rows=False, negate=op.scale < 0)
        return [s, render.wgmma("DpMma", element, n, a_in_registers=False, b_by_rows=False)]

    def sums(**columns: int) -> list[str]:
        return [render.wgmma(name, element, n, a_in_registers=True, b_by_rows=True) for name, n in columns.items()]

    kv_out = tuple(Field(name, "StridedOutput") for name in ("dk", "dv"))
    kv_constants = {"tile_q": config.tile_q, "tile_kv": 64, **common, **registers(config.kv_registers)}
    q_constants = {"tile_q": config.q_block, "tile_kv": config.tile_kv, **common, **registers(config.q_registers)}
    dkdv = finish(
        "attn_bwd_dkdv.cu", kv_constants, (*loads, *kv_out, *STATISTICS, *HEADS),
        products(config.tile_q) + sums(DvMma=dv, DkMma=d), every | {"Scheduler": kv_scheduler(op, direction)},
    )  # fmt: skip
    dq = finish(
        "attn_bwd_dq.cu", q_constants, (*loads, DQ, *STATISTICS, *HEADS),
        products(config.tile_kv) + sums(DqMma=d), every | {"Scheduler": q_scheduler(op, persistent=True)},
    )  # fmt: skip
    return dkdv, dq


@dataclasses.dataclass(frozen=True)
class SimtConfig:
    """A configuration of attn_bwd_dkdv_simt.cu and attn_bwd_dq_simt.cu."""

    tile_q: int = 32
    tile_kv: int = 32
    chunk: int = 64
    dq_chains: int = 1
    dq_parts: int = 1
    dq_columns: int = 64


def simt_config(op: Forward) -> SimtConfig:
    """Wide heads of doubles take smaller tiles: a thread has tile / 16 times columns / 16 numbers of each gradient."""
    widest = max(op.head_dim, op.head_dim_v)
    tile = 16 if op.element.itemsize == 8 and widest > 128 else 32
    return SimtConfig(tile, tile, min(64, -(-widest // 16) * 16))


def simt(op: Forward, config: SimtConfig, arch: str = "sm_75") -> tuple[Source, Source]:
    """attn_bwd_dkdv_simt.cu and attn_bwd_dq_simt.cu."""
    constants = {
        "tile_q": config.tile_q, "q_block": config.tile_q, "tile_kv": config.tile_kv, "chunk": config.chunk,
        "head_dim": op.head_dim, "head_dim_v": op.head_dim_v, "scale_sign": -1 if op.scale < 0 else 1,
    }  # fmt: skip
    loads = tuple(Field(name, "StridedTensor") for name in ("q", "k", "v", "d_o"))
    every = choices(op, fast=False) | {"Weight": weight.Identity()}
    made = []
    for file, out, plan in (
        ("attn_bwd_dkdv_simt.cu", ("dk", "dv"), kv_scheduler(op, persistent=False)),
        ("attn_bwd_dq_simt.cu", ("dq",), q_scheduler(op)),
    ):
        outputs = tuple(Field(name, "StridedOutput") for name in out)
        source = finish(file, constants, (*loads, *outputs, *STATISTICS, *HEADS), [], every | {"Scheduler": plan})
        made.append(dataclasses.replace(source, arch=arch))
    return made[0], made[1]


def operation(size: tuple[int, int], mask: Mask = Full(), score: Score = Scale(), scale: float = 0.1, **kinds: Any) -> Forward:  # noqa: B008
    """An operation of these head sizes, whose backward is meant."""
    kinds = {"element": BF16, "batch": 8, "q_len": 2048, "kv_len": 2048, "heads": 16, "kv_heads": 16, **kinds}
    if kinds.get("varlen"):
        kinds = {"total_q": kinds["batch"] * kinds["q_len"], "total_kv": kinds["batch"] * kinds["kv_len"], **kinds}
    return Forward(head_dim=size[0], head_dim_v=size[1], spec=Spec(mask, score, scale), **kinds)
