"""Cycles of transfers, kernels, launches and waits; a clock of the tiles of a layer."""
