"""append.cu: new keys and values go to their places in a cache, rotated by their positions."""

from __future__ import annotations

import dataclasses

from ..compile.compiler import Source
from ..driver.device import Device
from ..operation import Append
from ..operation.operand import Layout
from ..variant import Option, append, scheduler
from ..variant.element import E4M3, Record
from ..variant.field import Field, Fields, View, Violations
from ..variant.kv import PAGES, KvLens, PageListLens, scales
from .base import Kernel
from .paging import page_shift
from .program import Launch, Program
from .render import config_header, source

FILE = "append.cu"


@dataclasses.dataclass(frozen=True)
class AppendConfig:
    """The configuration of append.cu."""

    threads: int = 256  # of a block, which has one token


class AppendKernel(Kernel[Append]):
    """The launch that writes new rows."""

    name = "append"
    alignment = 1  # threads move as many elements at once as all places allow
    config_type = AppendConfig

    def runs_on(self, device: Device) -> bool:
        return not device.is_cpu

    def supports(self, op: Append, device: Device) -> list[str]:
        if device.is_cpu:
            return ["it runs on a GPU"]
        widest = max(op.head_dim, op.head_dim_v)
        return [f"head_dim is {widest}; it takes up to 1024"] if widest > 1024 else []

    def layout_reason(self, layout: Layout) -> str | None:
        return None

    def legal(self, config: AppendConfig, op: Append, device: Device) -> str | None:
        fits = isinstance(config.threads, int) and config.threads in (32, 64, 128, 256, 512, 1024)
        return None if fits else f"threads is {config.threads!r}; it must be a power of two from 32 to 1024"

    def candidates(self, op: Append, device: Device) -> list[AppendConfig]:
        return [AppendConfig()]

    def cost(self, config: AppendConfig, op: Append, device: Device) -> float:
        return 2e-6 + op.bytes / 2e12

    def tuning_shapes(self, op: Append) -> tuple[Append, ...]:
        return (op,)

    def options(self, op: Append, arch: str) -> dict[str, Option]:
        """The option on each axis."""
        lengths: Option = PageListLens() if op.lengths == "indptr" else KvLens()
        rotary: Option = append.NoRotary()
        if op.angles is not None:
            angle = "Number" if op.angles.name == op.element.lse_name else "Element"
            positions = append.GivenPositions() if op.positions else append.KeyPositions(lengths)
            rotary = append.RotaryPairs(positions, op.rotary_dim, op.rotary == "interleaved", angle)
            rotary = append.FromColumn(rotary, op.rotary_first) if op.rotary_first else rotary
        queries: Option = append.QueriesInPlace() if op.in_place else append.QueriesApart() if op.heads else append.NoQueries()
        place = append.Slots() if op.form == "slots" else append.InPages(lengths, PAGES[op.form])
        assert op.kv_element is not None
        same = op.kv_element == op.element
        storage: Option = append.SameStorage() if same else append.QuantizedStorage(*scales(op.k_scales, op.v_scales))
        kv_element, storage = (E4M3, append.RecordStorage()) if isinstance(op.kv_element, Record) else (op.kv_element, storage)
        return {
            "Element": op.element,
            "KvElement": kv_element,
            "Storage": storage,
            "Tokens": append.PackedTokens() if op.ragged and op.lengths else append.SameTokens(),
            "Destination": place if op.k else append.Nowhere(),
            "Rotary": rotary,
            "Queries": append.RopeQueries(queries) if op.q_rope else queries,
            "Launch": scheduler.launch_of(arch),
        }

    def fields(self, op: Append, arch: str) -> Fields:
        """The fields of struct Args, in order."""
        tensors = [Field(name, "StridedTensor", View(name)) for name in ("k", "v", "k_cache", "v_cache")]
        counts = (Field("kv_heads", "i32"), Field("v_heads", "i32"), Field("violations", "u32*", Violations()))
        of_options = (field for option in self.options(op, arch).values() for field in option.fields)
        return tuple(dict.fromkeys((*tensors, *counts, *of_options)))

    def render(self, op: Append, config: AppendConfig, arch: str) -> Source:
        """The source of operations of one kind."""
        chunks = -(-max(op.head_dim, op.head_dim_v) // op.width)
        lanes = min(32, 1 << (chunks - 1).bit_length())
        constants = {"head_dim": op.head_dim, "head_dim_v": op.head_dim_v, "width": op.width, "lanes": lanes}
        constants |= {"threads": config.threads}
        return source(FILE, config_header(constants, self.fields(op, arch), [], self.options(op, arch)), arch)

    def values(self, op: Append) -> dict[str, float]:
        """The run-time numbers of struct Args."""
        values: dict[str, float] = {"kv_heads": op.kv_heads * op.k, "v_heads": op.kv_heads * op.v, "heads": op.heads}
        values |= {
            "pages": op.pages,
            "page_size": op.page_size,
            "page_shift": page_shift(op),
            "indices_count": op.table,
            "max_kv_len": op.kv_len,
        }
        values |= {"batches": op.batch, "max_q_len": op.q_len, "max_positions": op.max_positions}
        values |= {"k_scale": op.k_scale, "v_scale": op.v_scale}
        return values | {"q_len": op.total if op.ragged else max(1, op.q_len)}

    def lower(self, op: Append, config: AppendConfig, device: Device) -> Program:
        """The launch; none where there is no new row."""
        if not op.total:
            return Program(())
        arch = device.arch
        rendered = self._keep((op.kind, config, arch), lambda: (self.render(op, config, arch), self.fields(op, arch)))
        return Program((Launch(self.name, *rendered, self.values(op), op.total),))


APPEND = AppendKernel()
