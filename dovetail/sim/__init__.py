"""Simulators of the emitted project: `iss` (firmware in an instruction-set simulator) and `host` (native C).

Unicorn, which executes the instructions, is GPL-2.0 licensed: it is imported only by the worker process
(`dovetail.sim.worker`), never by the process that uses this package.
"""
