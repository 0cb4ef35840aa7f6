"""Program that runs a parameter server or the scheduler: ``python -m lbbsp_mx.server``.

Use it on clusters without ``lbbsp launch``. ``DMLC_ROLE`` selects the role. The process serves
within the import of MXNet, and exits when the job ends.
"""

from __future__ import annotations

import sys

from lbbsp_mx import env

if __name__ == "__main__":  # reached only if the role is neither server nor scheduler
    role = env.cluster().get("DMLC_ROLE")
    print(
        f"DMLC_ROLE must be server or scheduler, got {role!r}: workers run the training script",
        file=sys.stderr,
    )
    sys.exit(2)
