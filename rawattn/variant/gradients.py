"""The options that kernels of the backward alone have; those of captured arrays are in ``gather.py``."""

from __future__ import annotations

import dataclasses
from typing import ClassVar

from ..trace.pair_axes import PairAxes
from . import Option
from .field import Field, Fields, Pointer, Scratch, TensorMap, View

# dk and dv; the sums in scratch that are parts of them, (parts of all key heads, rows of all sequences, columns), into how many
# parts the query heads of a key head are split, the rows of a part, and of a sequence where these are equal.
DK_DV: Fields = tuple(Field(name, "StridedOutput", View(name)) for name in ("dk", "dv"))
PARTS: Fields = (
    *(Field(name, "Number*", Scratch(name)) for name in ("dk_parts", "dv_parts")),
    Field("part_rows", "i64"), Field("batch_rows", "i64"), Field("group_parts", "i32"),
)  # fmt: skip
# dq, its float32 sums in scratch, and how many blocks have added to each of these.
DQ, DQ_SUM = Field("dq", "StridedOutput", View("dq")), Field("dq_sum", "float*", Scratch("dq_sum"))
TURNS = Field("turns", "i32*", Scratch("turns"))
DQ_SUMS = Field("dq_sums", "i32")  # sums of a tile of dq, where it may have several


# ---- Group: which of the query heads that share a key head one work has, and where its dk and dv go


class WholeGroup(Option):
    """A work has all query heads of a key head."""

    source: ClassVar[str] = "variant/group/whole.cuh"

    @property
    def fields(self) -> Fields:
        return DK_DV


class PartOfGroup(Option):
    """A work has some query heads of a key head, and a pass adds the sums of all works."""

    source: ClassVar[str] = "variant/group/part.cuh"

    @property
    def fields(self) -> Fields:
        return PARTS


# ---- Sharing: what warps of attn_bwd_mma that have the same keys divide


class ByQueries(Option):
    """They divide the queries."""

    source: ClassVar[str] = "variant/sharing/by_queries.cuh"


class ByColumns(Option):
    """They divide the columns, for heads wider than 256."""

    source: ClassVar[str] = "variant/sharing/by_columns.cuh"


# ---- Pass: which gradient a launch of attn_bwd_wide sums, and so which rows stay


class DvPass(Option):
    """Keys stay, and dv is summed."""

    source: ClassVar[str] = "variant/pass/dv.cuh"


class DkPass(Option):
    """Keys stay, and dk is summed."""

    source: ClassVar[str] = "variant/pass/dk.cuh"


class DqPass(Option):
    """Queries stay, and dq is summed."""

    source: ClassVar[str] = "variant/pass/dq.cuh"


# ---- Statistics, Dlse: in which order ``lse_log2`` and ``delta`` are in scratch, and what the gradient of lse is


class StatisticsByRows(Option):
    """Statistics are in the order of rows."""

    source: ClassVar[str] = "variant/statistics/by_rows.cuh"


class StatisticsByQuads(Option):
    """Statistics are in the order in which a quad of threads reads them: four of 16 queries at once."""

    source: ClassVar[str] = "variant/statistics/by_quads.cuh"


class ZeroDlse(Option):
    """The loss does not depend on lse."""

    source: ClassVar[str] = "variant/statistics/dlse.cuh"


class GivenDlse(Option):
    """The gradient of lse is an array with the strides of lse."""

    source: ClassVar[str] = "variant/statistics/dlse.cuh"

    @property
    def fields(self) -> Fields:
        return (Field("dlse", "const Number*", Pointer("dlse")),)


# ---- Steps, StepOrder: in how many loops a block goes over the steps of a work, and what a step makes


class OneLoop(Option):
    """One loop for all tiles, which asks of each whether the mask keeps it whole."""

    source: ClassVar[str] = "variant/step/one_loop.cuh"


@dataclasses.dataclass(frozen=True)
class TwoLoops(Option):
    """One loop for tiles that the mask cuts and one for those that it keeps whole. A warpgroup may keep nothing of a tile that is
    cut; where tiles are a list, ``of_list``, it is not known before how much it keeps."""

    of_list: bool = False
    source: ClassVar[str] = "variant/step/two_loops.cuh"

    @property
    def cuda_type(self) -> str:
        return f"TwoLoops<{str(not self.of_list).lower()}>"


class MemberLoops(Option):
    """The same of lists of blocks, whose steps may have keys of some warpgroups alone."""

    source: ClassVar[str] = "variant/step/member_loops.cuh"


class DqAtOnce(Option):
    """A step makes its own part of dq."""

    source: ClassVar[str] = "variant/step/at_once.cuh"


class DqStepLater(Option):
    """A step makes the part of dq of the step before, and packs weights late."""

    source: ClassVar[str] = "variant/step/later.cuh"


class DpLater(DqAtOnce):
    """A step starts dP when its weights are packed, in the registers of S."""

    source: ClassVar[str] = "variant/step/dp_later.cuh"


# ---- DqShare: which columns of dq a warpgroup makes


class PartsOfPanels(Option):
    """A part of dq is whole panels, or all columns."""

    source: ClassVar[str] = "variant/dq/parts_of_panels.cuh"


class PartsOfSharedPanel(Option):
    """A part of dq is a panel, and a half of the last one."""

    source: ClassVar[str] = "variant/dq/parts_of_shared_panel.cuh"


# ---- DqStore, Sum, Clear: how parts of dq meet, how many sums a tile of dq has, and what the first pass clears for that


class DqOrdered(Option):
    """Parts of dq are added to a sum in one order, and a pass over the sums follows."""

    source: ClassVar[str] = "variant/dq/ordered.cuh"

    @property
    def fields(self) -> Fields:
        return (DQ_SUM, TURNS)


class DqOrderedSums(DqOrdered):
    """Parts of dq are added to several sums in turn, to each in one order, and a pass over the sums follows."""

    source: ClassVar[str] = "variant/dq/ordered_sums.cuh"

    @property
    def fields(self) -> Fields:
        return (DQ_SUM, TURNS, DQ_SUMS, Field("sum_tiles", "i32"))


class DqOrderedFinal(DqOrdered):
    """Parts of dq are added to a sum in one order, and the last contributor makes dq, without a pass."""

    source: ClassVar[str] = "variant/dq/ordered_final.cuh"


class DqUnordered(Option):
    """Parts of dq are added to a sum as they come: its last bits vary from run to run."""

    source: ClassVar[str] = "variant/dq/unordered.cuh"

    @property
    def fields(self) -> Fields:
        return (DQ_SUM,)


class DqRedOrdered(DqOrdered):
    """Parts of dq are added from registers to a sum in one order, and a pass over the sums follows."""

    source: ClassVar[str] = "variant/dq/red_ordered.cuh"


class DqRedUnordered(DqUnordered):
    """Parts of dq are added from registers to a sum as they come: its last bits vary from run to run."""

    source: ClassVar[str] = "variant/dq/red_unordered.cuh"


class IntervalSum(Option):
    """The mask says whether a tile of dq has a sum."""

    source: ClassVar[str] = "variant/dq/sum_is_there.cuh"


class IntervalSums(IntervalSum):
    """The mask says how many sums a tile of dq has (``DqOrderedSums``)."""

    @property
    def fields(self) -> Fields:
        return (DQ_SUMS,)


class BandSums(Option):
    """The mask says which sums a tile of dq has, where each band has sums of its own (``walk.QIntervalBand``)."""

    source: ClassVar[str] = "variant/dq/band_sums.cuh"

    @property
    def fields(self) -> Fields:
        return (DQ_SUMS, Field("part_tiles", "i32"), PARTS[-1])


class ListSum(Option):
    """The turns of a tile of dq say whether it has a sum."""

    source: ClassVar[str] = "variant/dq/sum_is_there.cuh"

    @property
    def fields(self) -> Fields:
        return (Field("turns", "const i32*", Scratch("turns")),)


class ListSums(ListSum):
    """The turns of each sum of a tile of dq say whether it is there (``DqOrderedSums``)."""

    @property
    def fields(self) -> Fields:
        return (*super().fields, DQ_SUMS)


class ClearedSum(Option):
    """Every tile of dq has a sum, which was cleared."""

    source: ClassVar[str] = "variant/dq/sum_is_there.cuh"


class ClearNothing(Option):
    """Nothing is cleared: one block writes the whole of each output."""

    source: ClassVar[str] = "variant/dq/clear_nothing.cuh"


class ClearTurns(Option):
    """The turns are cleared in which blocks add to dq (``DqOrdered``)."""

    source: ClassVar[str] = "variant/dq/clear_turns.cuh"

    @property
    def fields(self) -> Fields:
        return (TURNS,)


class ClearTurnsOfSums(ClearTurns):
    """The turns of all sums are cleared (``DqOrderedSums``)."""

    source: ClassVar[str] = "variant/dq/clear_turns_of_sums.cuh"

    @property
    def fields(self) -> Fields:
        return (TURNS, DQ_SUMS)


class ClearTurnsDq(ClearTurns):
    """The turns are cleared, and dq of rows that keep no key, which no block writes (``DqOrderedFinal``)."""

    source: ClassVar[str] = "variant/dq/clear_turns_and_rows.cuh"

    @property
    def fields(self) -> Fields:
        return (TURNS, DQ)


class ClearListTurnsDq(ClearTurnsDq):
    """The turns and such rows of dq are cleared where key tiles are a list."""

    source: ClassVar[str] = "variant/dq/clear_list_turns_and_rows.cuh"


class ClearDqSum(Option):
    """The sums are cleared to which blocks add in any order (``DqUnordered``)."""

    source: ClassVar[str] = "variant/dq/clear_sum.cuh"

    @property
    def fields(self) -> Fields:
        return (DQ_SUM,)


# ---- DsStore, Elements: what becomes of dS besides dq, and how the elements of pairs come that a score reads


class DsKept(Option):
    """No dS is stored: it is for dq alone."""

    source: ClassVar[str] = "variant/ds/kept.cuh"


@dataclasses.dataclass(frozen=True)
class DsStored(DsKept):
    """dS is stored as the gradient of a captured array with this name and these axes, in boxes of ``box_rows`` rows."""

    operand: str
    axes: PairAxes
    box_rows: int
    source: ClassVar[str] = "variant/ds/stored.cuh"

    @property
    def constants(self) -> dict[str, int]:
        return {"ds_first_q": self.axes.first_q, "ds_first_kv": self.axes.first_kv}

    @property
    def fields(self) -> Fields:
        return (Field("ds", "TmaTensorOnce", TensorMap(f"d{self.operand}", self.box_rows, self.axes)),)


class DsStoredFilled(DsStored):
    """dS is stored, with zeros where a mask leaves out all queries of a tile: for key tiles whose query tiles are no list."""

    source: ClassVar[str] = "variant/ds/stored_filled.cuh"

    @property
    def fields(self) -> Fields:
        return (*super().fields, Field("ds_rows", "StridedOutput", View(f"d{self.operand}", self.axes)))


class TransposedElements(Option):
    """Threads read elements of logits whose rows are keys, when they need them, or all before."""

    source: ClassVar[str] = "variant/ds/no_elements.cuh"


@dataclasses.dataclass(frozen=True)
class TmaElements(Option):
    """TMA brings elements of a captured array with this name and these axes to the place of dS, in boxes of ``box_rows`` rows:
    ``once``, where each pair has an element of its own, whose gradient takes as much room in L2 (perf/notes/functions.md)."""

    operand: str
    axes: PairAxes
    box_rows: int
    once: bool
    source: ClassVar[str] = "variant/ds/elements.cuh"

    @property
    def constants(self) -> dict[str, int]:
        return {"elements_first_q": self.axes.first_q, "elements_first_kv": self.axes.first_kv}

    @property
    def fields(self) -> Fields:
        ctype = "TmaTensorOnce" if self.once else "TmaTensor"
        return (Field("elements", ctype, TensorMap(self.operand, self.box_rows, self.axes, "q")),)


# ---- DqRows, DkvRows, Blocks, Unused: numbers of 16 and of 32 bits, and rows that are in no tile


class StoreRows16(Option):
    """A pass stores rows of a gradient in 16-bit numbers."""

    source: ClassVar[str] = "variant/store/rows16.cuh"


class StoreRows32(Option):
    """A pass stores rows of a gradient in 32-bit numbers."""

    source: ClassVar[str] = "variant/store/rows32.cuh"


class Blocks16(Option):
    """A warp's blocks of 16-bit numbers are operands of mma.sync."""

    source: ClassVar[str] = "variant/blocks/bits16.cuh"


class Blocks32(Option):
    """A warp's blocks of 32-bit numbers are operands of mma.sync."""

    source: ClassVar[str] = "variant/blocks/bits32.cuh"


class BehindLast(Option):
    """A pass clears gradients of rows behind the last one of sequences end to end."""

    source: ClassVar[str] = "variant/unused/behind_last.cuh"


class BehindUsed(Option):
    """A pass clears, in each sequence, gradients of rows behind those that ``q_lens`` and ``kv_lens`` say it uses."""

    source: ClassVar[str] = "variant/unused/behind_used.cuh"
