"""Counters that all workers share, on the coordination service of TensorFlow.

`MultiWorkerMirroredStrategy` runs the service. Its `IncrementKeyValue` adds to a counter and
returns the sum, atomically. TensorFlow's Python has no function for it, so that it is called by
gRPC; whether it answers is tried before the first step.
"""

from __future__ import annotations

import functools
from typing import Any

import grpc
from google.protobuf import descriptor_pool, message_factory, text_format
from google.protobuf.descriptor_pb2 import FileDescriptorProto
from google.protobuf.message import DecodeError

_TRIAL_SECONDS = 5.0
_TRIALS = 5
# The fields that are used here, as they are on the wire.
_MESSAGES = """
    name: "lbbsp/counters.proto" package: "lbbsp" syntax: "proto3"
    message_type { name: "Request"
        field { name: "key" number: 1 type: TYPE_STRING label: LABEL_OPTIONAL }
        field { name: "increment" number: 2 type: TYPE_INT64 label: LABEL_OPTIONAL } }
    message_type { name: "Entry"
        field { name: "value" number: 2 type: TYPE_BYTES label: LABEL_OPTIONAL } }
    message_type { name: "Response"
        field { name: "kv" number: 1 type: TYPE_MESSAGE type_name: ".lbbsp.Entry"
            label: LABEL_OPTIONAL } }
"""


class Counters:
    """Counters by key; a new one is 0.

    Args:
        address: ``host:port`` of worker 0, which runs the service.
    """

    def __init__(self, address: str) -> None:
        # A proxy is for other networks than that of the workers.
        channel = grpc.insecure_channel(address, options=[("grpc.enable_http_proxy", 0)])
        service = "/tensorflow.CoordinationService/"
        self._request, response = _message_classes("Request", "Response")
        self._increment, self._delete = (
            channel.unary_unary(
                service + name, self._request.SerializeToString, response.FromString
            )
            for name in ("IncrementKeyValue", "DeleteKeyValue")
        )

    def add(self, key: str, number: int) -> int:
        """Adds to a counter, and returns its value before.

        The call has no time limit: it ends with the process of worker 0, whose silence ends this
        one (rule 11). A limit would leave open whether the number has been added.

        Raises:
            grpc.RpcError: The connection to worker 0 has broken.
        """
        return self._sum(key, number) - number

    def forget(self, key: str) -> None:
        """Deletes a counter, without waiting for it."""
        self._delete.future(self._request(key=key))

    def is_usable(self, key: str) -> bool:
        """Returns whether the service counts as expected; tries it with a new counter."""
        try:
            counts = [self._sum(key, 1, timeout=_TRIAL_SECONDS) for _ in range(_TRIALS)]
        except (grpc.RpcError, DecodeError, ValueError):
            return False
        self.forget(key)
        return counts == [*range(1, _TRIALS + 1)]

    def _sum(self, key: str, number: int, timeout: float | None = None) -> int:
        request = self._request(key=key, increment=number)
        return int(self._increment(request, timeout=timeout).kv.value)


def _message_classes(*names: str) -> list[Any]:
    """Returns classes of messages, which TensorFlow's package does not contain."""
    pool = descriptor_pool.DescriptorPool()
    pool.Add(text_format.Parse(_MESSAGES, FileDescriptorProto()))
    descriptors = (pool.FindMessageTypeByName(f"lbbsp.{name}") for name in names)
    return [*map(message_factory.GetMessageClass, descriptors)]


counters = functools.cache(Counters)
"""Returns the counters of a job, always the same ones."""
