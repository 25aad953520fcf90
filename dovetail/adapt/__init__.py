"""Adapt."""
