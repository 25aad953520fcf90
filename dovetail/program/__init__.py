"""The program: what the core does step by step: copies, launches, calls and waits over placed buffers."""
