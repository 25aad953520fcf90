"""Cycles of copies: rows as a DMA moves them, each beginning a beat of its own."""

from __future__ import annotations

from collections.abc import Iterable

from dovetail.ir.layout import Layout, nbytes
from dovetail.ir.types import TensorType
from dovetail.program.ir import Copy, dense_view
from dovetail.program.transfers import dma_rows, dma_sizes, same_packing
from dovetail.records import Record
from dovetail.target.chip import Dma
from dovetail.target.engine import StreamDma


class CopyCost(Record):
    """Cost of a copy, or of several one after the other."""

    starts: int = 0
    """Transfers that are started one by one."""
    cycles: int = 0
    """Cycles of the DMA for all of them."""

    def __add__(self, other: CopyCost) -> CopyCost:
        return CopyCost(self.starts + other.starts, self.cycles + other.cycles)


FREE = CopyCost()


def dma_cycles(dma: Dma | StreamDma | None, row_bytes: int, rows: int = 1) -> int:
    """Cycles of one transfer: its setup, and for each row the beats it takes; 0 without a DMA."""
    return 0 if dma is None else dma.setup_cycles + rows * -(-row_bytes // dma.bytes_per_cycle)


def copy_cost(dma: Dma | StreamDma | None, copies: Iterable[Copy]) -> CopyCost:
    """Cost of copies by a DMA; an engine's own has a command for each plane of rows. Without one the core copies: rows
    of up to 4 bytes in 5 cycles, others in 8 and one for each 2 bytes, as `iss` shows it of RV32IMC."""
    if dma is None:
        moves = [(one.destination_rows, one.nbytes) for copy in copies for one in dma_sizes(copy)]
        return CopyCost(0, sum(5 * rows if nbytes <= 4 * rows else 8 * rows + nbytes // 2 for rows, nbytes in moves))
    parts = dma_rows if isinstance(dma, StreamDma) else dma_sizes
    each = [dma_cycles(dma, one.destination_row_bytes, one.destination_rows) for copy in copies for one in parts(copy)]
    return CopyCost(len(each), sum(each))


def relayout_cost(
    dma: Dma | StreamDma | None, kind: TensorType, lies: Layout | None, wanted: Layout | None
) -> CopyCost:
    """Cost of bringing a whole value from one layout to another; where the elements of a byte change, as if all bytes
    of both layouts were moved in one transfer."""
    if not same_packing(lies, wanted):
        moved = nbytes(lies, kind) + nbytes(wanted, kind)
        return CopyCost(1, dma_cycles(dma, moved)) if dma else CopyCost(0, moved)
    return copy_cost(dma, [Copy(0, dense_view("", kind, 0, lies), dense_view("", kind, 0, wanted))])
