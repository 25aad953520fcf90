"""MAERI: a tree of multipliers that forms dot products of any sizes."""
