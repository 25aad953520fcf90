"""`dovetail calibrate`: cycles of library calls and of a core's own instructions, measured on the simulated chip."""
