"""Lets workers of Keras wait for each other as long as a busy machine needs.

A script imports it before lbbsp: none of its workers is lost because it was suspended for long, and
no wait ends early. What is tested with a shorter time has that time as an option of its own.
"""

import os

from lbbsp_core.runtime.options import defaults

SECONDS = 300.0  # only ends what hangs

if os.environ.get("TF_CONFIG"):
    defaults.SILENCE_SECONDS = SECONDS  # a default of what is imported next
    from lbbsp_core.runtime.extensions import metrics_file
    from lbbsp_core.runtime.record import writer
    from lbbsp_tf.compat import coordination
    from lbbsp_tf.exchange import claims

    metrics_file._PATIENCE_SECONDS = writer._PATIENCE_SECONDS = SECONDS
    claims._TRIAL_SECONDS = SECONDS
    coordination.HEARTBEAT_MILLISECONDS = coordination._PATIENCE_MILLISECONDS = int(1e3 * SECONDS)
