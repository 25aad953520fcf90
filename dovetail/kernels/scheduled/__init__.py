"""Core kernels as algorithms and schedules: what is computed (`algorithms`), how (`schedules`), with which of the
core's own instructions (`select`), and the C of it (`write`)."""
