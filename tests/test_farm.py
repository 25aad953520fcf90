"""Work over processes and clusters: the results are those of one process, whatever dies on the way."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path

import pytest

from dovetail.errors import DovetailError
from dovetail.farm import LOST, farm
from dovetail.guests.check.findings import Checked
from dovetail.guests.check.suite import check
from dovetail.targets import load_target
from porting import TINY, order, port_file
from warm_pools import POOL


def odd(item: int) -> int:
    """Its square; ends its process for 13, raises for 14."""
    if item == 13:
        os._exit(1)
    if item == 14:
        raise ValueError("fourteen")
    return item * item


@pytest.mark.parametrize("jobs", [1, 3])
def test_what_dies_takes_nothing_along(jobs: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Processes that are started as users' are."""
    monkeypatch.setattr("dovetail.farm.ProcessPoolExecutor", POOL)
    items = [1, 13, 2, 3, 13, 4]
    with farm(jobs) as run:
        assert dict(run(odd, items)) == {0: 1, 1: LOST, 2: 4, 3: 9, 4: LOST, 5: 16}
        assert dict(run(odd, [5, 6])) == {0: 25, 1: 36}, "the processes are there again"
        assert list(run(odd, [])) == []
        with pytest.raises(ValueError, match="fourteen"):
            list(run(odd, [14]))
        assert dict(run(odd, [7])) == {0: 49}
    with farm(1, here=True) as run:
        assert list(run(odd, [1, 2, 3])) == [(0, 1), (1, 4), (2, 9)]


def test_a_cluster_gives_the_same() -> None:
    distributed = pytest.importorskip("distributed", reason="--scheduler needs distributed (dovetail[tune])")
    one = {"n_workers": 1, "threads_per_worker": 1, "processes": True, "dashboard_address": None}
    with distributed.LocalCluster(**one) as cluster, farm(1, cluster.scheduler_address) as run:
        assert dict(run(odd, [1, 2, 3])) == {0: 1, 1: 4, 2: 9}
        assert dict(run(odd, [13, 2])) == {0: LOST, 1: 4}
    with pytest.raises(DovetailError, match="no Dask scheduler"), farm(1, "nonsense"):
        pass
    with pytest.raises(DovetailError, match="0 jobs are too few"), farm(0):
        pass


def told(found: Checked) -> object:
    """What a check says, without times and arrays."""
    tested = [replace(one, seconds=0.0) for one in found.tested]
    return [(one.title, one.suspicions, one.needed, one.also) for one in found.findings], tested


def test_a_check_on_two_processes_finds_the_same(tmp_path: Path) -> None:
    """In a port with a fault, and in one without."""
    fault = ("layer.weights, np.int8)", "layer.weights.transpose(0, 2, 1, 3), np.int8)")
    for name, planted in (("right", ("", "")), ("wrong", fault)):
        path = port_file(tmp_path / name, *planted)
        target = load_target(str(path))
        alone = check(target, order(limits=TINY))
        together = check(target, order(limits=TINY), name=str(path), jobs=2)
        assert told(alone) == told(together) and bool(alone.findings) == (planted == fault)
