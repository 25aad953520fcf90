"""A RISC-V microcontroller with a VTA matrix engine driven by an instruction stream."""
