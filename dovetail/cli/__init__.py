"""Cli."""

import os

# Products of small matrices: the threads of numpy's library would take several times their work only to wait. They are
# made when numpy is first imported, so this comes before; who sets the variable decides.
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
