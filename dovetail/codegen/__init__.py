"""From a placed program to C, and from C to firmware."""
