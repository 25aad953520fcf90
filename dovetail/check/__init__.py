"""`dovetail check`: a port's test suite, made from what the target declares.

    cases     layers at, just inside and just outside every limit (`layers` makes them from a pattern)
    run       each on the Python model (`model`), the simulated chip, Verilog or this computer
    shrink    a failure to its smallest form
    suspect   what is likely wrong, from what the result equals instead and from what a failure cannot do without
    lint      declarations that cannot be right
    report    one screen per finding, JUnit, Markdown
"""
