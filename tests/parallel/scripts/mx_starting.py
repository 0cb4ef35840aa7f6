"""Sums gradients of parameters at once after their broadcast, which nothing orders in MXNet."""

import lbbsp_mx

import mxnet as mx  # isort: skip
from report import result

KEYS, SHAPE = 300, (100, 100)


def main():
    store = lbbsp_mx.KVStore()
    wrong = 0
    for key in range(KEYS):
        weight, gradient = mx.nd.full(SHAPE, store.rank + 7), mx.nd.ones(SHAPE)
        store.broadcast(key, weight, [weight], priority=-key)
        store.pushpull(key, [gradient], priority=-key)
        wrong += (weight.asnumpy() != 7).any() or (gradient.asnumpy() != 2).any()
    result("wrong", int(wrong))


if __name__ == "__main__":
    main()
