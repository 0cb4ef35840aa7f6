"""What the scheduler tells the launcher about processes that are lost."""

import os

import pytest

pytest.importorskip("lbbsp_mx", reason="needs mxnet: pip install 'lbbsp[mx]'")

from lbbsp_core.runtime.options import env
from lbbsp_core.runtime.reliability import marks
from lbbsp_mx.reliability.liveness import NodesWatch
from lbbsp_mx.reliability.nodes import node_names


class Transport:
    silent: frozenset[int] = frozenset()

    def is_ready(self):
        return True

    def has_beaten(self, node):
        return node not in self.silent


@pytest.mark.parametrize(("frozen", "rank"), [({13}, 2), ({8}, None)])
def test_the_launcher_learns_which_worker_is_frozen(tmp_path, monkeypatch, frozen, rank):
    monkeypatch.setattr(env, "marks", lambda: tmp_path)
    monkeypatch.setattr(os, "getsid", lambda _: os.getpid())
    transport, names = Transport(), node_names(workers=3, servers=1)
    peers = {("localhost", port) for port in range(len(names))}
    watch = NodesWatch(lambda: transport, lambda: peers, names, 10.0)
    for _ in range(10):
        assert watch.look(0.5) is None
    transport.silent = frozenset(frozen)
    said = [why for _ in range(22) if (why := watch.look(0.5))]
    assert said[0] == f"{names[min(frozen)]} has given no sign of life for 10 s"
    lost = marks.read_marks(tmp_path).lost
    assert (lost.rank if lost else None) == rank
