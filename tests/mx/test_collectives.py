"""The store of a trainer in one process."""

import lbbsp_mx
from lbbsp_mx.store.native import runtime
from lbbsp_mx.store.trainer_store import TrainerStore


class Late:
    """An array whose value another thread computes, which needs the lock of the store."""

    def __init__(self):
        self.was_free = None

    def wait_to_read(self):
        if self.was_free is None:
            self.was_free = not runtime().lock.locked()


def test_values_are_awaited_before_other_threads_are_locked_out(monkeypatch):
    store = TrainerStore(lbbsp_mx.KVStore("local"))
    sent = []
    monkeypatch.setattr(
        store, "_native", type("Native", (), {"broadcast": lambda _, *args: sent.append(args)})()
    )
    value, out = Late(), Late()
    store.broadcast(0, value, [out])
    assert value.was_free
    assert out.was_free
    assert [args[1:3] for args in sent] == [(value, [out])]
