"""Tuning: what may be chosen about each layer is searched, measured in simulated cycles, and kept in a small file."""
