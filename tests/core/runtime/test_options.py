"""Options that the plugins of all frameworks share."""

import json
import logging
import math
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import get_type_hints

import numpy as np
import pytest

from lbbsp_core import (
    AsyncOptions,
    EpochBalanced,
    Even,
    FixedShares,
    Limits,
    LoadBalanced,
    Narx,
    Observe,
    Options,
    SessionOptions,
    SingleWorker,
    WorkerSession,
)
from lbbsp_core.runtime.options.naming import read_predictor


def test_a_policy_of_the_users_own_or_lb_bsp_with_options():
    assert SessionOptions().choose_policy() == LoadBalanced()
    options = SessionOptions(interval=3, min_gain=0.1)
    assert options.choose_policy() == LoadBalanced(min_gain=0.1, interval=3)
    assert SessionOptions(policy=Even()).choose_policy() == Even()
    with pytest.raises(ValueError, match=r"\['min_gain'\] are options of the default policy"):
        SessionOptions(policy=Even(), min_gain=0.1)


def test_another_default_gives_way_to_the_options_of_lb_bsp():
    assert SessionOptions().choose_policy(Even()) == Even()
    assert SessionOptions(interval=2).choose_policy(Even()) == LoadBalanced(interval=2)
    assert SessionOptions(policy=LoadBalanced()).choose_policy(Even()) == LoadBalanced()


def plugin(self, model, *, checkpoint=None, **options):
    """Function of a plugin that passes options on."""


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"granularty": 8}, "no option 'granularty': did you mean 'granularity'"),
        ({"chekpoint": "x"}, r"did you mean 'checkpoint'.* Known names: model, checkp"),
        ({"sync": "ssp:3"}, "sync is an option of asynchronous training"),
    ],
)
def test_an_unknown_option_is_named_with_the_nearest_one(given, words):
    assert SessionOptions.of({"granularity": 8}, plugin).granularity == 8
    with pytest.raises(TypeError, match=words):
        SessionOptions.of(given, plugin)


def test_the_types_of_keyword_arguments_are_those_of_the_options():
    assert get_type_hints(Options) == get_type_hints(SessionOptions)
    assert not Options.__required_keys__


VALUES = {
    "policy": "observe", "predictor": "last", "cost": "proportional", "limits": 4,
    "granularity": 2, "interval": 2, "min_gain": 0.1, "record": "run", "seed": 1, "drivers": (),
    "silence_seconds": 5.0, "metrics_file": "a.prom", "limit_seconds": 9.0, "compare_weights": 7,
    "short_step_seconds": 1.0,
}  # fmt: skip


@pytest.mark.parametrize("name", get_type_hints(Options))
def test_the_keyword_arguments_of_asynchronous_training_are_those_that_it_does_not_refuse(name):
    options = SessionOptions.of({name: VALUES[name]})
    refused = pytest.raises(ValueError, match="has no effect in asynchronous training")
    with nullcontext() if name in get_type_hints(AsyncOptions) else refused:
        options.check_asynchronous(0)


@pytest.mark.parametrize(
    ("text", "options", "policy"),
    [
        ("observe", {}, Observe()),
        ("observe", {"min_gain": 0.0}, Observe()),  # of the script's own policy
        ("lbbsp:min_gain=0.5", {"interval": 3}, LoadBalanced(0.5, 3)),
        (" ", {"interval": 3}, LoadBalanced(interval=3)),
        ("observe", {"policy": "dbs"}, EpochBalanced()),
    ],
)
def test_the_environment_chooses_a_policy_where_the_script_does_not(
    monkeypatch, caplog, text, options, policy
):
    monkeypatch.setenv("LBBSP_POLICY", text)
    given, by_environment = SessionOptions(**options), text.strip() and "policy" not in options
    with caplog.at_level(logging.WARNING):
        assert given.choose_policy(rank=1) == policy
        assert not caplog.messages
        assert given.choose_policy(rank=0) == policy
    said = [f"LBBSP_POLICY = {text} chooses the policy: {policy!r}"] if by_environment else []
    assert caplog.messages == said


def test_a_policy_of_the_environment_that_cannot_be_used_is_named(monkeypatch):
    monkeypatch.setenv("LBBSP_POLICY", "obsrve")
    with pytest.raises(ValueError, match=r"LBBSP_POLICY cannot be used: .* did you mean 'observe'"):
        SessionOptions().choose_policy()
    with pytest.raises(ValueError, match="LBBSP_POLICY cannot be used"):
        SessionOptions().for_workers(1, 8)
    monkeypatch.setenv("LBBSP_POLICY", "fixed:2/1")  # has a value for each of two workers
    options = SessionOptions(interval=2)
    assert options.for_workers(1, 8).choose_policy() == Even()
    assert options.for_workers(2, 8).choose_policy() == FixedShares((2.0, 1.0))


@pytest.mark.parametrize(
    ("option", "value", "words"),
    [
        ("silence_seconds", 0.5, r"silence_seconds must be >= 2, got 0\.5: a busy machine"),
        ("silence_seconds", math.nan, "silence_seconds must be finite and > 0, got nan"),
        ("limit_seconds", 0, "limit_seconds must be finite and > 0, got 0"),
        ("interval", "2", "interval must be an integer >= 1, got '2'"),
        ("min_gain", "0", r"min_gain must be in \[0, 1\), got '0'"),
        ("seed", None, "seed must be an integer >= 0, got None"),
        ("drivers", 5, "drivers must be a list of names, got 5"),
        ("drivers", "runnable", "drivers must be a list of names, got 'runnable'"),
        ("drivers", [5], r"drivers must be a list of names, got \[5\]"),
        ("drivers", ["runable"], "no driving factor 'runable': did you mean 'runnable'"),
        ("compare_weights", True, "compare_weights must be an integer >= 1, got True"),
        ("limit_seconds", True, "limit_seconds must be finite and > 0, got True"),
        ("min_gain", False, r"min_gain must be in \[0, 1\), got False"),
        ("short_step_seconds", -1, "short_step_seconds must be finite and >= 0, got -1"),
        ("record", True, "record must be a path, got True"),
        ("metrics_file", 5, "metrics_file must be a path, got 5"),
    ],
)
def test_wrong_values_are_named(option, value, words):
    with pytest.raises((TypeError, ValueError), match=words):
        SessionOptions(**{option: value})


def test_resources_are_sampled_only_for_a_policy_that_predicts():
    options = SessionOptions(drivers=("runnable",))
    assert options.choose_drivers(LoadBalanced()) == ("runnable",)
    assert options.choose_drivers(Even()) == ()
    assert SessionOptions().choose_drivers(LoadBalanced()) is None


def test_the_record_is_where_the_user_or_the_launcher_says(monkeypatch):
    monkeypatch.delenv("LBBSP_RUN_DIR", raising=False)
    assert SessionOptions().record_path() is None
    monkeypatch.setenv("LBBSP_RUN_DIR", "/runs/one")
    assert SessionOptions().record_path() == Path("/runs/one")
    assert SessionOptions(record="mine.jsonl").record_path() == Path("mine.jsonl")


def test_integers_of_numpy_will_do():
    session = WorkerSession(
        SingleWorker(), np.int64(8), SessionOptions(granularity=np.int64(4)), framework="none"
    )
    session.use_order(session.make_order(16))
    session.start({})
    assert session.sizes == (8,)
    assert json.dumps([type(session.options.granularity)(4), session.facts()])


def test_names_are_read_once_and_the_options_can_be_copied():
    options = SessionOptions(policy="lbbsp", min_gain=0.1, predictor="narx", limits=64)
    assert options.policy == LoadBalanced(min_gain=0.1)
    copy = replace(options, granularity=8)
    assert copy.choose_policy() == LoadBalanced(min_gain=0.1)
    assert copy.limits == Limits(maximum=64)
    assert read_predictor(copy.predictor, 3) == Narx(horizon=3)
