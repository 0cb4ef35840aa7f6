"""What a `LoadBalancer` does at each event of `model.fit`, in the order of these events."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import keras
import tensorflow as tf

from lbbsp_core.runtime.extensions.record_file import Recording
from lbbsp_core.runtime.extensions.step_figures import StepFigures
from lbbsp_core.runtime.extensions.stopping import Stopping
from lbbsp_tf import compat
from lbbsp_tf.compat import Nest
from lbbsp_tf.exactness import agreement, checks
from lbbsp_tf.exchange.collectives import mirrored_collectives
from lbbsp_tf.monitoring import WorkerScalars
from lbbsp_tf.reliability.checkpoints import Checkpoints
from lbbsp_tf.step.batchnorm import synchronized_layers
from lbbsp_tf.step.step import PartsOfStep
from lbbsp_tf.step.train_step import TrainStep
from lbbsp_tf.training import Training

Logs = dict[str, float] | None


class BalancedFit(keras.callbacks.Callback):
    """Hooks of Keras, in the order in which it calls them; the base of `LoadBalancer`."""

    def __init__(
        self, training: Training, workers: int, checkpoints: Checkpoints | None, *, logs: bool
    ) -> None:
        super().__init__()
        self.strategy, self.workers = training.strategy, workers
        self.replicas = self.strategy.num_replicas_in_sync
        self.active = self.replicas > 1
        """True if there is more than one replica, among which batches can be divided."""
        self._training, self._input = training, training.input
        self._session = training.sessions.leader
        self._checkpoints = checkpoints
        self._adds_figures = logs and self.active
        step_figures = self._session.extensions[StepFigures]
        step_figures.wanted, self._figures = self._adds_figures, step_figures.running
        self._scalars = WorkerScalars(self._session)
        self._train_functions: dict[PartsOfStep | None, Callable[..., Nest]] = {}
        self._traced_for: tuple[object, ...] = ()
        self._in_fit = self._in_step = False
        self._callbacks: keras.callbacks.CallbackList | None = None

    def set_model(self, model: keras.Model) -> None:
        """Takes the model of the fit, unless it belongs to Keras 2."""
        checks.check_model_class(model)
        super().set_model(model)

    def on_train_begin(self, logs: Logs = None) -> None:
        """Checks the arguments of the fit, and starts the session with the handshake."""
        self._in_fit = False  # a failed fit does not call on_train_end
        self._training.user = self
        running = compat.running_callbacks()
        checks.check_callbacks(running, BalancedFit)
        if self.active:
            checks.check_model(self.model, self.strategy)
            compat.take_whole_batches(self.model)
        order = self._input.order
        # Under a strategy of several replicas `fit` has already built the model for its data.
        if order is None or (self.active and self._input.announced is None):
            if self.active or self._checkpoints:
                raise checks.not_fed_by_balancer()
            return  # a single worker with the user's own data
        checks.check_steps(self.params.get("steps"), order.steps_per_epoch)
        if self.active:
            own_facts = {"epochs": self.params["epochs"], "logs": int(self._adds_figures)}
            facts = {**own_facts, **agreement.facts_of(self.model)}
            self._training.begin(facts, partial(agreement.weights_of, self.model))
            self._scalars.begin_fit(running)
            self._add_figures()
        else:
            self._input.begin_alone()
            compat.require_targets(self.model, self._input.pipeline.batches.element_spec)
            if self._checkpoints:
                compat.build(self.model, self._input.pipeline.example)
        if self.active or self._checkpoints:
            # Keras calls it in this event already, after all others.
            running[:] = [entry for entry in running if not isinstance(entry, _AfterOthers)]
            running.append(_AfterOthers(self, self._checkpoints))

    def on_epoch_begin(self, epoch: int, logs: Logs = None) -> None:
        """Excludes the first step of the epoch; in a new fit, moves to its first epoch."""
        self._figures.begin_epoch(self._session.step)
        if self._in_fit:
            if self.active:
                self._training.begin_epoch()
            return
        self._in_fit = True
        resumes = self._checkpoints is not None and self._checkpoints.resumes
        if self.active:
            self._training.begin_first_epoch(epoch, resumes=resumes)
            self._session.extensions[Recording].plan(epochs=self.params["epochs"] - epoch)
            self._replace_train_function()
        elif not resumes:
            self._session.begin_epoch(epoch)

    def on_train_batch_begin(self, batch: int, logs: Logs = None) -> None:
        """Sets the weight of a sample; restarts the timer if the step is excluded."""
        if self.active:
            mains, _ = self._session.balancer.schedule.split(self._session.step)
            compat.set_last_rows(self.model, mains[self._session.rank])
            self._training.begin_step()
            self._in_step = True

    def on_train_batch_end(self, batch: int, logs: Logs = None) -> None:
        """Ends the step; a single worker, which has no exchange, advances its session."""
        if self._in_step:  # `_train` has not run
            raise ValueError(
                "a step has run without the balancer, because a callback has replaced the train "
                "function within an epoch: call make_train_function(force=True) in on_epoch_begin "
                "or on_epoch_end"
            )
        if self.active:
            self._training.end_step()
            self._scalars.end_step()
        elif self._input.order is not None:
            self._session.skip_step()

    def on_epoch_end(self, epoch: int, logs: Logs = None) -> None:
        """Compares what the workers have read, and warns if their input is too slow."""
        if self.active:
            self._input.end_epoch()
            self._scalars.end_epoch()

    def on_test_begin(self, logs: Logs = None) -> None:
        """Excludes the step after an evaluation inside `fit`."""
        self._training.sessions.exclude_step()
        self._training.leave_steps()

    def on_train_end(self, logs: Logs = None) -> None:
        """Ends the session, and restores the model."""
        self._in_fit = False
        if not self.active:
            self._input.end_fit()
            return
        self._training.end()
        self._scalars.end_fit()
        if self._callbacks is not None:
            compat.stop_adding(self._callbacks)
            self._callbacks = None
        self.model.train_function = None

    def renew_train_function(self) -> None:
        """Makes a train function balanced that a callback has made anew, as after freezing layers.

        A collective between two epochs.
        """
        function = self.model.train_function  # ours, perhaps in a wrapper of the user's
        is_new = function is None or function.__module__.split(".")[0] in ("keras", "tensorflow")
        if self._session.any_worker(is_new):
            self._traced_for = ()
            self._replace_train_function()

    def _add_figures(self) -> None:
        """Adds figures to the logs of this fit: of the recent steps, and of the epoch."""
        self._callbacks, figures = compat.running_list(), self._figures
        if self._adds_figures and self._callbacks is not None:
            compat.add_to_logs(
                self._callbacks, lambda: figures.recent._asdict(), lambda: figures.epoch._asdict()
            )

    def _replace_train_function(self) -> None:
        """Wraps the model's step for this fit; traces it again only if the model has changed."""
        model = self.model
        config = getattr(model, "_compile_config", None)
        layers = synchronized_layers(model)
        traced_for = (model, model.optimizer, config, *self._input.iterators, *layers)
        if [*map(id, traced_for)] != [*map(id, self._traced_for)]:
            self._step = self._training.prepare(TrainStep.of_model(model))
            self._train_functions = {}
            self._traced_for = traced_for
        model.train_function = partial(self._train, model)

    def _train(self, model: keras.Model, iterator: Nest) -> Nest:
        """Runs a balanced step; a fit that fails leaves this function in the model."""
        if not self._in_step:
            model.make_train_function(force=True)  # trained without the balancer
            return model.train_function(iterator)
        self._in_step, variants = False, self._training.sharing.step_variants
        if any(parts not in self._train_functions for parts in variants):
            traced = {parts: self._function(model, iterator, parts) for parts in variants}
            self._train_functions = traced
        return self._train_functions[self._step.parts](iterator)

    def _function(
        self, model: keras.Model, iterator: Nest, parts: PartsOfStep | None
    ) -> Callable[..., Nest]:
        """Returns a train function; where steps may share work it is traced, and does nothing."""
        train_function, step = model.train_function, self._step
        with compat.replaced(model, "train_step", step), compat.replaced(step, "parts", parts):
            model.make_train_function(force=True)
            function: Callable[..., Nest] = model.train_function
            model.train_function = train_function
            if len(self._training.sharing.step_variants) > 1 and not model.run_eagerly:
                tf.function(function, autograph=False).get_concrete_function(iterator)
        return function


class _AfterOthers(keras.callbacks.Callback):
    """Callback that runs after all others of a fit, and sees what each of them has done.

    It delays every request to stop until the workers have exchanged it (rule 11), compares their
    models, and writes checkpoints.
    """

    def __init__(self, fit: BalancedFit, checkpoints: Checkpoints | None) -> None:
        super().__init__()
        self.set_model(fit.model)
        self.set_params(fit.params)
        self._fit, self._session = fit, fit._session
        self._is_active, self._checkpoints = fit.active, checkpoints
        self._collectives = mirrored_collectives(fit.strategy) if fit.workers > 1 else None
        self._callbacks = compat.running_callbacks()

    def on_train_begin(self, logs: Logs = None) -> None:
        if self._collectives:
            agreement.share_restored_model(self.model, self._collectives)
            agreement.check_learning_rates(self.model, self._collectives)
        if self._checkpoints:
            self._checkpoints.begin_fit(self.model, self.params["epochs"])

    def on_epoch_begin(self, epoch: int, logs: Logs = None) -> None:
        if self._is_active:
            self._fit.renew_train_function()
        if self._checkpoints:
            self._checkpoints.begin_epoch(epoch)

    def on_train_batch_end(self, batch: int, logs: Logs = None) -> None:
        if self._is_active:
            if self.model.stop_training:
                self._session.request_stop()
            self.model.stop_training = self._session.stopping
        if self._checkpoints:
            is_last = self.model.stop_training or batch + 1 == self.params["steps"]
            self._checkpoints.end_step(batch, is_last=is_last)

    def on_epoch_end(self, epoch: int, logs: Logs = None) -> None:
        model, session = self.model, self._session
        model.stop_training = session.any_worker(
            model.stop_training or session.extensions[Stopping].requested
        )
        self._check_models()
        if self._checkpoints:
            self._checkpoints.end_epoch(epoch, stops=model.stop_training)

    def on_train_end(self, logs: Logs = None) -> None:
        self._callbacks.remove(self)
        self._check_models()
        if self._checkpoints:
            self._checkpoints.end_fit()

    def _check_models(self) -> None:
        if self._collectives:
            agreement.check_models(self.model, self._collectives)
