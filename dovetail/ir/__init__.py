"""Typed graphs: the form a network has between the stages."""
