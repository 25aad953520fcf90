"""`dovetail check`: a port's test suite, made from what the target declares.

layers    layers of a pattern, by a setting per axis
cases     layers at, just inside and just outside every limit; declarations that cannot be right
run       each on the Python model, the simulated chip, Verilog or this computer
suspect   a failure in its smallest form; what is likely wrong, from what the result equals instead
findings  what was found, as text, JUnit, Markdown
suite     all of it, on several processes or a cluster too
"""
