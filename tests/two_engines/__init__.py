"""Chips with two engines: target files of a user's own."""
