"""The version of Dovetail."""

__version__ = "0.1.0"
