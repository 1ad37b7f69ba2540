"""attn_bwd_columns.cu: the gradients of attention on Hopper for heads of 136 to 192 columns, which warpgroups share out."""

from __future__ import annotations

import dataclasses

from ..compile.compiler import Source
from ..driver.device import Device
from ..operation import Backward, Forward
from ..variant import Option, gradients
from ..variant.field import Fields
from . import attn_bwd, attn_bwd_works, backward, tiling
from .attn_bwd import AttnBwd, AttnBwdConfig
from .render import wgmma

NARROWEST = 128  # columns, above which heads have three panels of 64


@dataclasses.dataclass(frozen=True)
class AttnBwdColumnsConfig(AttnBwdConfig):
    """The configuration of attn_bwd_columns.cu: its three warpgroups have 64 columns each, and 32 keys of S and dP."""

    consumers: int = 3
    dq_parts: int = 3
    dq_columns: int = 64
    dq_stages: int = 1
    do_stages: int = 1
    ds_stages: int = 1
    producer_registers: int = 32
    consumer_registers: int = 160
    parts: int = 1
    query_parts: int = 1

    @property
    def tile_kv(self) -> int:
        return 32 * self.consumers


def smem_bytes(config: AttnBwdConfig, op: Forward) -> int:
    """Shared memory of a block, at most: as of attn_bwd.cu, with P beside dS, both in panels of 64 keys."""
    pairs = 2 * config.tile_q * 128 * -(-config.tile_kv // 64)
    return attn_bwd.smem_bytes(dataclasses.replace(config, ds_stages=0), op) + pairs


class AttnBwdColumns(AttnBwd):
    """The kernel and its launches. Nobody has timed it: it is asked for."""

    name = "attn_bwd_columns"
    config_type = AttnBwdColumnsConfig

    def meant_for(self, op: Backward, device: Device) -> bool:
        return False

    def prefers(self, op: Backward, device: Device) -> bool:
        return False

    def supports(self, op: Backward, device: Device) -> list[str]:
        forward = op.forward
        reasons = self.device_reasons(device) + tiling.tensor_core_reasons(forward, attn_bwd.WIDEST_HEAD)
        if min(forward.head_dim, forward.head_dim_v) <= NARROWEST:
            reasons.append(
                f"head_dim and head_dim_v are {forward.head_dim} and {forward.head_dim_v}; it takes both above {NARROWEST}"
            )
        if not attn_bwd.is_plain(forward):
            reasons.append("it takes no list of tiles, and weights and scores that nothing changes")
        return reasons + backward.reasons(op, 64, 96, places=2) + tiling.reasons(self.layout_reason(op.layout))

    def legal(self, config: AttnBwdConfig, op: Backward, device: Device) -> str | None:
        given, usual = ({"store": "", "direction": "", **_fixed(each)} for each in (config, AttnBwdColumnsConfig()))
        if given != usual or config.store == "final" or config.order != "at_once" or config.steps != "together":
            return f"the configuration has {given}; it has one, but for how key tiles meet, and finishes no dq"
        if config.store == "unordered" and op.forward.spec.deterministic:
            return "store is 'unordered', whose last bits vary from run to run; it needs deterministic=False"
        reason = attn_bwd_works.wrong(op, config) or backward.wrong_direction(op.forward, config.direction)
        return reason or tiling.too_large_block(smem_bytes(config, op.forward), device)

    def candidates(self, op: Backward, device: Device) -> list[AttnBwdConfig]:
        """Its configuration."""
        return [config for config in (AttnBwdColumnsConfig(),) if self.legal(config, op, device) is None]

    def render_main(self, ds: Option, elements: Option, op: Forward, config: AttnBwdConfig, arch: str) -> tuple[Source, Fields]:
        keys, n = config.tile_kv // config.consumers, config.tile_kv
        products = [
            wgmma("SMma", op.element, keys, a_in_registers=False, b_by_rows=False, negate=op.scale < 0),
            wgmma("DpMma", op.element, keys, a_in_registers=False, b_by_rows=False),
            wgmma("DvMma", op.element, n, a_in_registers=False, a_by_rows=True, b_by_rows=True),
            wgmma("DkMma", op.element, n, a_in_registers=False, a_by_rows=True, b_by_rows=True),
            wgmma("DqMma", op.element, config.dq_columns, a_in_registers=False, b_by_rows=True),
        ]
        own = {"DsStore": ds, "DqShare": gradients.PartsOfPanels()}
        return attn_bwd.render("attn_bwd_columns.cu", op, config, arch, products, own)


def _fixed(config: AttnBwdConfig) -> dict[str, int]:
    """The numbers of a configuration that are always the same: tiles, stages, registers, parts of heads."""
    free = ("dq_sums", "heads_together", "bundle")
    return {name: x for name, x in dataclasses.asdict(config).items() if isinstance(x, int) and name not in free}


ATTN_BWD_COLUMNS = AttnBwdColumns()
