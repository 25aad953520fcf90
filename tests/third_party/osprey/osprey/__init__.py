"""A target, a command and an operator."""
