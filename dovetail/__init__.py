"""Dovetail fits a neural network to the accelerator you built."""

__version__ = "0.1.0"
