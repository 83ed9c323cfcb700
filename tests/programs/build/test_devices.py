"""Which devices act, and what the processes of a program see of an accelerator."""

import dataclasses

import jax
import pytest

from rlstack.configs.acting import InferencerConfig, ServiceConfig
from rlstack.configs.learner import LearnerConfig
from rlstack.programs.build import devices
from rlstack.programs.program.topologies import environment
from tests.programs.running import ppo

ON_CPU = {"JAX_PLATFORMS": "cpu"}
NO_PREALLOCATION = {"XLA_PYTHON_CLIENT_PREALLOCATE": "false"}


def experiment(topology, learner=(), inferencer=(), service=()):
    return dataclasses.replace(
        ppo(topology),
        learner=LearnerConfig(devices=learner),
        inferencer=InferencerConfig(devices=inferencer),
        service=ServiceConfig(devices=service),
    )


def test_actors_see_no_accelerator_unless_they_act_on_it():
    plain, acting = experiment("heavy_env"), experiment("heavy_env", inferencer=(1,))
    assert environment("actor", plain) == environment("actor") == ON_CPU
    assert environment("actor", acting) == NO_PREALLOCATION
    served = experiment("light_env", inferencer=(1,))
    assert environment("actor", served) == ON_CPU
    assert environment("replay", acting) == environment("evaluator", acting) == ON_CPU


def test_a_learner_takes_the_memory_of_all_devices_only_if_nobody_else_acts_on_one():
    assert environment("learner", experiment("light_env", learner=(0, 1))) == {}
    for cfg in (experiment("light_env", (0,), (1,)), experiment("light_env", service=(1,))):
        assert environment("learner", cfg) == NO_PREALLOCATION
        assert environment("inferencer", cfg) == NO_PREALLOCATION


def test_actors_and_services_take_devices_in_turn(monkeypatch):
    found = ["a", "b", "c", "d"]
    monkeypatch.setattr(jax, "local_devices", lambda backend=None: found)
    heavy = experiment("heavy_env", inferencer=(1, 3))
    assert [devices.actor_device(heavy, rank) for rank in range(3)] == ["b", "d", "b"]
    assert devices.service_device(experiment("light_env", inferencer=(2,)), 5) == "c"
    both = experiment("light_env", inferencer=(2,), service=(3,))
    assert devices.service_device(both, 0) == "d"
    assert devices.service_device(experiment("light_env"), 0) is None
    assert devices.single_process_device(experiment("single_process", (3, 0))) == "d"
    assert devices.single_process_device(experiment("single_process", (3,), (1,))) == "b"


def test_actors_act_on_the_cpu_where_there_is_an_accelerator(monkeypatch):
    plain = experiment("heavy_env")
    assert devices.actor_device(plain, 0) is None
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    assert devices.actor_device(plain, 0) == jax.local_devices(backend="cpu")[0]


def test_devices_are_counted_in_another_process(monkeypatch):
    monkeypatch.setenv("JAX_PLATFORMS", "cpu")
    monkeypatch.setenv("XLA_FLAGS", "--xla_force_host_platform_device_count=3")
    fits = experiment("light_env", learner=(0, 1), inferencer=(2,))
    shown = devices.check_devices(fits)
    assert shown == "learner.devices 0 1, inferencer.devices 2 (of 3: cpu)"
    with pytest.raises(ValueError, match=r"Experiment: inferencer.devices .* 3 local .* got 3\."):
        devices.check_devices(experiment("light_env", learner=(0,), inferencer=(3,)))
    assert devices.check_devices(experiment("light_env")) == "JAX's default device"


def acting(actors=4, devices=(0,), topology="heavy_env", env=None, **program):
    """An experiment whose actors might share a thread that acts."""
    made = ppo(topology, program={"num_actors": actors, **program}, env=env)
    return dataclasses.replace(made, inferencer=InferencerConfig(devices=devices))


@pytest.mark.parametrize(
    ("options", "plugin", "services", "why"),
    [
        ({}, True, 1, "so many"),
        ({"devices": (0, 1)}, True, 2, "so many"),
        ({"actors": 2}, True, 0, "so few"),
        ({"pacing": "lock_step"}, True, 0, "lock-step"),
        ({"env": {"wait_num": 4}}, True, 0, "equal sizes"),
        ({"devices": ()}, True, 0, "on a CPU"),
        ({}, False, 0, "on a CPU"),
        ({"launch": "processes"}, True, 0, ""),
        ({"acting": "own"}, True, 0, "as program.acting says"),
        ({"acting": "shared", "actors": 2, "devices": ()}, False, 1, "as program.acting says"),
        ({"topology": "light_env"}, True, 1, ""),
    ],
)
def test_who_acts_for_actors_in_threads(monkeypatch, options, plugin, services, why):
    monkeypatch.setattr(devices.importlib.metadata, "entry_points", lambda group: [1] * plugin)
    experiment = acting(**options)
    assert devices.num_services(experiment) == services
    assert why in devices.acting_of(experiment)[1]


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"launch": "processes"}, "launch threads"),
        ({"topology": "light_env"}, "topology heavy_env"),
        ({"env": {"wait_num": 4}}, "wait_num 0"),
    ],
)
def test_acting_that_cannot_be_shared_is_refused(options, reason):
    with pytest.raises(ValueError, match=rf"shared only .*{reason}.*--program.acting own"):
        devices.check_devices(acting(acting="shared", **options))
