"""The sizes of a layer of dot products."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Layer:
    """A convolution; a dense layer is one of 1x1 over a 1x1 image. Sizes of the input are with its padding."""

    rows: int
    """Of the kernel."""
    columns: int
    channels: int
    """Input channels of one group."""
    filters: int
    """Output channels of one group."""
    in_rows: int
    in_columns: int
    groups: int = 1
    stride: int = 1

    @property
    def out_rows(self) -> int:
        """Rows of the result."""
        return (self.in_rows - self.rows) // self.stride + 1

    @property
    def out_columns(self) -> int:
        """Columns of the result."""
        return (self.in_columns - self.columns) // self.stride + 1

    @property
    def taps(self) -> int:
        """Products of one sum."""
        return self.rows * self.columns * self.channels

    @property
    def macs(self) -> int:
        """Products of the layer."""
        return self.taps * self.filters * self.groups * self.out_rows * self.out_columns
