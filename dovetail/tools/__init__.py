"""What is built on the compiler: quantisation of float models, tuning, sweeps, checks of ports, reports."""
