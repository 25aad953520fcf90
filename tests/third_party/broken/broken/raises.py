"""A module that does not import."""

raise RuntimeError("the bird has flown")
