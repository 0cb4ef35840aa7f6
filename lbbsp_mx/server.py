"""``python -m lbbsp_mx.server``: a parameter server or the scheduler, for clusters of your own.

``DMLC_ROLE`` says which. It serves from within the import of MXNet, and exits with the job.
"""

from __future__ import annotations

import sys

from lbbsp_mx import env

if __name__ == "__main__":  # reached only if the import of this package did not serve
    role = env.cluster().get("DMLC_ROLE")
    print(
        f"DMLC_ROLE must be server or scheduler, got {role!r}: start workers with their own script",
        file=sys.stderr,
    )
    sys.exit(2)
