"""Operators that come with Dovetail, written as a user's own are."""
