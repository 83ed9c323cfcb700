"""The XLA flags that a program sets; flags that the user has set stay."""

import dataclasses
import types

import jax
import pytest

from rlstack.agents.dqn import DQNConfig
from rlstack.agents.ppo import PPOConfig
from rlstack.configs.acting import InferencerConfig
from rlstack.configs.learner import LearnerConfig
from rlstack.networks import NetworkConfig
from rlstack.programs.build import xla
from rlstack.programs.config.experiment import EnvConfig, Experiment, ProgramConfig
from rlstack.programs.config.member_config import MemberConfig
from rlstack.programs.config.presets.registry import on_policy_replay, transitions
from rlstack.programs.program.base import Setup
from tests.fused.cases import on_policy


@pytest.fixture
def environ(monkeypatch):
    """The environment variables, all removed."""
    variables = {}
    monkeypatch.setattr(xla, "os", types.SimpleNamespace(environ=variables))
    return variables


def test_convolutions_have_all_cores(environ):
    xla.configure(convolutions=True)
    assert environ == {}


def test_one_of_several_processes_has_one(environ):
    xla.configure(convolutions=True, single_thread=True)
    assert environ == {"XLA_FLAGS": xla.SINGLE_THREAD, xla.POOL_SIZE: "1"}


def test_small_networks_have_the_older_runtime_in_one_thread(environ, monkeypatch):
    monkeypatch.setattr(xla, "_has_legacy_runtime", lambda: True)
    xla.configure(convolutions=False)
    assert environ["XLA_FLAGS"].split() == [xla.LEGACY_CPU_RUNTIME, xla.SINGLE_THREAD]
    assert environ[xla.POOL_SIZE] == "1"


def test_a_runtime_that_is_not_there_is_not_asked_for(environ, monkeypatch):
    monkeypatch.setattr(xla, "_has_legacy_runtime", lambda: False)
    xla.configure(convolutions=False)
    assert environ == {}


def test_what_the_user_has_set_stays(environ, monkeypatch):
    monkeypatch.setattr(xla, "_has_legacy_runtime", lambda: True)
    mine = "--xla_cpu_use_thunk_runtime=true --xla_cpu_multi_thread_eigen=true"
    environ.update({"XLA_FLAGS": mine, xla.POOL_SIZE: "3"})
    xla.configure(convolutions=False, single_thread=True)
    assert environ == {"XLA_FLAGS": mine, xla.POOL_SIZE: "3"}
    environ.clear()
    environ["NPROC"] = "2"
    xla.configure(convolutions=False)
    assert environ[xla.POOL_SIZE] == "2"


def loop(agent=None, batch_size=128, unroll=0, devices=(), **fields):
    """An experiment in a compiled loop; with an unroll it is on-policy."""
    replay = transitions(batch_size, 10_000, 1_000, updates_per_frame=1 / 8)
    if unroll:
        replay = on_policy_replay(8, unroll)
    return Experiment(
        "test",
        agent or DQNConfig(),
        EnvConfig("CartPole-v1", 8, "jax"),
        replay,
        topology="fused",
        frames=1000,
        learner=LearnerConfig(devices=devices),
        **fields,
    )


@pytest.mark.parametrize(
    "experiments, suits",
    [
        ([loop()], True),
        ([loop(), loop()], False),
        ([loop(batch_size=256)], False),
        ([loop(network=NetworkConfig(hidden_sizes=(64, 128)))], False),
        ([loop(network=NetworkConfig(core="lstm", core_size=128))], False),
        ([loop(network=NetworkConfig(torso="minatar"))], False),
        ([loop(PPOConfig(), unroll=64)], True),  # in four minibatches
        ([loop(PPOConfig(), unroll=128)], False),
        ([loop(devices=(0, 1))], False),
    ],
)
def test_a_loop_of_small_operations_has_one_thread(experiments, suits):
    assert xla.suits_one_thread(experiments) == suits


def test_all_policies_of_a_set_count():
    assert xla.suits_one_thread([on_policy()])
    wide = {"first": MemberConfig(network=NetworkConfig(hidden_sizes=(512, 512)))}
    experiment = on_policy()
    experiment = dataclasses.replace(experiment, policies={**experiment.policies, **wide})
    assert not xla.suits_one_thread([experiment])


@pytest.mark.parametrize("own", [{}, {"XLA_FLAGS": "--xla_dump_to=x", xla.POOL_SIZE: "3"}])
def test_programs_that_a_run_starts_do_not_inherit_what_it_has_set(environ, monkeypatch, own):
    read = {}
    monkeypatch.setattr(xla.jax, "devices", lambda: read.update(environ))
    environ.update(own)
    xla.configure_runs([loop()])
    assert read[xla.POOL_SIZE] == own.get(xla.POOL_SIZE, "1")
    assert xla.SINGLE_THREAD in read["XLA_FLAGS"]
    assert environ == own


@pytest.mark.parametrize(
    ("topology", "launch", "actors", "devices", "acting", "graphs"),
    [
        ("heavy_env", "threads", 3, (0,), "own", False),
        ("heavy_env", "threads", 3, (0,), "shared", True),
        ("heavy_env", "threads", 2, (0,), "own", True),
        ("heavy_env", "threads", 3, (), "own", True),  # which act on the CPU
        ("heavy_env", "processes", 3, (0,), "auto", True),
        ("light_env", "threads", 3, (0,), "auto", True),  # where one service acts
    ],
)
def test_many_threads_act_without_cuda_graphs(
    environ, monkeypatch, topology, launch, actors, devices, acting, graphs
):
    read = {}
    monkeypatch.setattr(xla.jax, "devices", lambda: read.update(environ))
    env = EnvConfig("CartPole-v1", 8)
    experiment = dataclasses.replace(
        loop(),
        env=env,
        topology=topology,
        program=ProgramConfig(launch=launch, num_actors=actors, acting=acting),
        inferencer=InferencerConfig(devices=devices),
    )
    xla.configure_runs([experiment])
    assert (xla.NO_CUDA_GRAPHS in read.get("XLA_FLAGS", "").split()) != graphs


@pytest.mark.parametrize(
    ("platform", "precision", "flags", "told"),
    [
        ("cpu", None, "", ""),
        ("gpu", None, "", "on H200. Products of float32 matrices have default precision (JAX_"),
        ("gpu", "highest", xla.NO_CUDA_GRAPHS, "on H200, without CUDA graphs. Products"),
        ("tpu", "highest", "", "have highest precision."),
    ],
)
def test_an_accelerator_and_its_precision_are_logged_once(
    environ, monkeypatch, caplog, platform, precision, flags, told
):
    environ["XLA_FLAGS"] = flags
    device = types.SimpleNamespace(platform=platform, device_kind="H200")
    monkeypatch.setattr(xla.jax, "local_devices", lambda: [device])
    xla.tell_accelerator.cache_clear()
    with jax.default_matmul_precision(precision):
        xla.tell_accelerator()
        xla.tell_accelerator()
    xla.tell_accelerator.cache_clear()
    assert len(caplog.messages) == bool(told)
    assert told in "".join(caplog.messages)


@pytest.mark.parametrize("launch", ["threads", "processes"])
def test_a_node_in_a_thread_does_not_choose_for_the_others(environ, launch):
    program = ProgramConfig(launch=launch)
    network = NetworkConfig(torso="nature")
    experiment = dataclasses.replace(loop(network=network), topology="heavy_env", program=program)
    Setup(experiment, None, None).configure_jax(single_thread=True)
    one = {"XLA_FLAGS": xla.SINGLE_THREAD, xla.POOL_SIZE: "1"}
    assert environ == ({} if launch == "threads" else one)
