"""Cli."""

import gc
import os

# Products of small matrices: the threads of numpy's library would take several times their work only to wait. They are
# made when numpy is first imported, so this comes before; who sets the variable decides.
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
# Nearly all that a command makes is data without circles: looking for these every 700 objects takes a tenth of it.
gc.set_threshold(50_000, 20, 50)
