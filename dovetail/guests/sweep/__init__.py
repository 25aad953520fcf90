"""Sweeps of hardware: a model compiled and run for every point of a grid of sizes."""
