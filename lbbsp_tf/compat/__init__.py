"""All patches of Keras: idempotent, applied only where Keras needs them, each with its reason."""

from lbbsp_tf.compat.batch_norm import plain_batch_norm_noticed, synchronize_moments
from lbbsp_tf.compat.conditional_updates import allow_conditional_updates
from lbbsp_tf.compat.coordination import (
    abort_collectives,
    compare_variables,
    explained_by_variables,
    extend_heartbeat_timeout,
    lost_worker,
    restore_sigterm,
)
from lbbsp_tf.compat.evaluation import patch_evaluation
from lbbsp_tf.compat.fitting import build, patch_keras, require_targets
from lbbsp_tf.compat.metrics import (
    added_vectors_scaled,
    intercepted_scalars,
    take_whole_batches,
    token_means_scaled,
    with_results_of_all,
)
from lbbsp_tf.compat.optimizers import (
    Apply,
    Gradient,
    Gradients,
    TensorLike,
    intercepted_apply,
    note_optimizers,
    sum_gradients,
)
from lbbsp_tf.compat.outputs import write_once_per_job
from lbbsp_tf.compat.probing import (
    NOISES,
    batch_norm_in_inference,
    intercepted_gradients,
    own_gradients_scaled,
    same_noise,
    without_outputs,
)
from lbbsp_tf.compat.random import forget_global_seed, has_global_seed, shared_global_seed
from lbbsp_tf.compat.replicas import STRATEGIES, bytes_per_pack, replicas_view
from lbbsp_tf.compat.state import (
    add_to_logs,
    assign_total,
    callback_states,
    global_random_state,
    is_mirrored,
    last_rows,
    latest_epochs,
    restore_callbacks,
    running_callbacks,
    running_list,
    set_last_rows,
    start_at_batch,
    stop_adding,
)
from lbbsp_tf.compat.switches import Switches
from lbbsp_tf.compat.tracing import attributes_kept, current_graph, fresh_traces, plain_variable
from lbbsp_tf.compat.values import Array, Method, Nest, local, replaced
