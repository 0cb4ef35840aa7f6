"""Whether this process may listen on the port of its task."""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator, Sequence

from lbbsp_core.doctor import addresses
from lbbsp_core.doctor.base import Finding, problem


def check_port(
    check: str, port: int, where: str, numbers: Sequence[str] = ("",)
) -> Iterator[Finding]:
    """Yields why a port cannot be opened, if it cannot."""
    errors = [error for number in numbers if (error := addresses.bind_error(number, port))]
    if not errors:
        return
    if errno.EADDRINUSE in errors:
        reason = f"is used by {addresses.user_of(port)}"
        remedy = f"end it (`ss -ltnp 'sport = :{port}'`), or choose another port in {where}"
    elif errno.EACCES in errors:
        reason, remedy = "may not be opened by this user", f"choose a port above 1023 in {where}"
    else:
        reason = f"cannot be opened: {os.strerror(errors[0])}"
        remedy = f"choose another port in {where}"
    yield problem(check, f"port {port} {reason}", remedy)
