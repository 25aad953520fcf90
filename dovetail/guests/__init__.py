"""Guests of the compiler: post-training quantisation, meshes, checks of ports, tuning, sweeps, reports, export."""
