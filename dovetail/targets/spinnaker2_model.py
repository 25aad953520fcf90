"""The MAC array of a SpiNNaker2 element as a device: it computes as those of the mesh do, and takes their clocks."""

from __future__ import annotations

from collections.abc import Mapping

from dovetail.sim.mac_array import JOB as JOB
from dovetail.sim.mac_array import KINDS as KINDS
from dovetail.sim.mac_array import compute as compute
from dovetail.sim.mac_array import macs as macs
from dovetail.sim.mac_array import work_of
from dovetail.targets.spinnaker2 import ARRAY


def cycles(job: Mapping[str, int]) -> int:
    """Clocks of a job."""
    return int(ARRAY.clocks(work_of(job)))
