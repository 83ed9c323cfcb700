"""Whether JAX's default device computes what the CPU does.

Both compile the same functions, with products of matrices in full float32. They sum in different
orders, so results differ in the last digits, and an optimizer such as Adam divides small gradients
by their own size. So updates are compared as a whole: the sum of all differences between the new
params, divided by the sum of all changes.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks.accelerator.settings import experiment_of, spec_of
from benchmarks.learners import random_batch
from rlstack.acting.actor import transition_spec
from rlstack.acting.inferencer import Inferencer
from rlstack.acting.params import FixedParams
from rlstack.agent import Agent
from rlstack.programs.build.agent import make_agent
from rlstack.programs.config.experiment import Experiment
from rlstack.storage import checkpoint
from rlstack.types import Batch, EnvSpec, PyTree

_KEY = 7
_UPDATE_ERROR = 0.02  # of the change of the params
_LOG_ERROR = 2e-3  # of the loss, or absolute if the loss is below 1
_ACTION_SHARE = 0.99  # of equal greedy actions
AGENTS = (
    "cartpole-ppo",
    "cartpole-impala",
    "cartpole-a2c",
    "cartpole-reinforce",
    "cartpole-dqn",
    "cartpole-c51",
    "cartpole-rainbow",
    "cartpole-qrdqn",
    "cartpole-iqn",
    "cartpole-munchausen",
    "cartpole-pqn",
    "memory-cartpole-r2d2",
    "pendulum-sac",
    "pendulum-td3",
    "pendulum-ddpg",
    "pong-ppo",
    "pong-impala",
)
_FEW = ("cartpole-dqn", "pendulum-sac")


def devices() -> tuple[jax.Device, jax.Device]:
    """Returns the first CPU, and the last of JAX's default devices, which may be the same one."""
    return jax.local_devices(backend="cpu")[0], jax.local_devices()[-1]


def updates(name: str, quick: bool) -> dict[str, Any]:
    """Makes the same update of each agent on the CPU and on the default device."""
    del name
    found = {preset: update_errors(preset) for preset in (_FEW if quick else AGENTS)}
    wrong = [
        preset
        for preset, (update, loss) in found.items()
        if not (update <= _UPDATE_ERROR and loss <= _LOG_ERROR)
    ]
    return {
        "passed": not wrong,
        "agents": len(found),
        "largest_update_error": max(update for update, _ in found.values()),
        "largest_loss_error": max(loss for _, loss in found.values()),
        "wrong": wrong,
        "errors": found,
    }


def update_errors(name: str) -> tuple[float, float]:
    """Returns the relative error of the change of the params, and that of the loss."""
    step, (params, state), batch = _update_of(name)
    cpu, default = devices()
    results = []
    with jax.default_matmul_precision("highest"):
        for device in (cpu, default):
            with jax.default_device(device):
                compiled = jax.jit(lambda *args: step(*args))
                after, _, output = compiled(*jax.device_put((params, state, batch), device))
                leaves, logs = jax.device_get((jax.tree.leaves(after), output.logs))
                results.append((leaves, float(np.mean(logs["loss"]))))
    (expected, its_loss), (got, loss) = results
    before = jax.tree.leaves(jax.device_get(params))
    change = sum(float(np.abs(a - b).sum()) for a, b in zip(expected, before, strict=True))
    error = sum(float(np.abs(a - b).sum()) for a, b in zip(expected, got, strict=True))
    loss_error = abs(its_loss - loss) / max(1.0, abs(its_loss))
    return round(error / max(change, 1e-12), 7), round(loss_error, 7)


def _update_of(name: str) -> tuple[Callable[..., Any], tuple[PyTree, PyTree], Batch]:
    """Returns an agent's update, its initial params and learner state, and a batch of one size."""
    experiment = experiment_of(name)
    spec, agent = _made(experiment)
    size = min(experiment.replay.batch_size, 8)  # the CPU may have few cores
    length = min(experiment.replay.unroll_length, 32) + 1
    if name.startswith("pong"):
        length = 9
    batch = random_batch(transition_spec(agent, spec), length, size)
    with jax.default_device(devices()[0]):
        params = jax.jit(agent.initial_params)(jax.random.PRNGKey(_KEY))
        state = jax.jit(agent.initial_learner_state)(jax.random.PRNGKey(_KEY + 1), params)
    return agent.learner_step, (params, state), batch


def repeats(name: str, quick: bool) -> dict[str, Any]:
    """Makes the same updates of each agent twice, each compiled anew, and compares all bits."""
    del name
    equal = {preset: repeats_bit_for_bit(preset) for preset in (_FEW if quick else AGENTS)}
    return {
        "equal": sum(equal.values()),
        "agents": len(equal),
        "differ": [preset for preset, same in equal.items() if not same],
    }


def repeats_bit_for_bit(name: str) -> bool:
    """Returns whether three updates from one state give the same params and logs a second time."""
    step, state, batch = _update_of(name)
    ends = []
    for _ in range(2):
        jax.clear_caches()  # XLA chooses its kernels when it compiles
        compiled = jax.jit(step)
        params, learner_state = jax.device_put(state, devices()[1])
        for _ in range(3):
            params, learner_state, output = compiled(params, learner_state, batch)
        ends.append(jax.device_get((params, learner_state, output.logs)))
    pairs = zip(jax.tree.leaves(ends[0]), jax.tree.leaves(ends[1]), strict=True)
    return all(np.asarray(a).tobytes() == np.asarray(b).tobytes() for a, b in pairs)


def acting(name: str, quick: bool) -> dict[str, Any]:
    """Acts greedily on the CPU and on the default device, with the same params."""
    del name
    shares = {}
    for preset in ("cartpole-dqn",) if quick else ("cartpole-ppo", "cartpole-dqn", "pong-ppo"):
        experiment = experiment_of(preset)
        spec, agent = _made(experiment, greedy=True)
        params = jax.jit(agent.initial_params)(jax.random.PRNGKey(_KEY))
        batch = random_batch(transition_spec(agent, spec), 2, 64)
        timestep = jax.tree.map(lambda x: x[0], batch.trajectory.timestep)
        actions = []
        for device in devices():
            with jax.default_device(device):
                inferencer = Inferencer(
                    experiment.inferencer,
                    agent,
                    FixedParams(params),
                    64,
                    jax.random.PRNGKey(0),
                    device=device,
                )
                actions.append(np.asarray(inferencer(None, timestep).agent_output.action))
        shares[preset] = float(np.mean(actions[0] == actions[1]))
    least = min(shares.values())
    return {"passed": least >= _ACTION_SHARE, "equal_actions": least, "shares": shares}


def checkpoint_moves(name: str, quick: bool) -> dict[str, Any]:
    """Saves a learner's state from each device and restores it on the other, bit for bit."""
    del name
    experiment = experiment_of("cartpole-dqn" if quick else "pong-ppo")
    _, agent = _made(experiment)
    params = jax.jit(agent.initial_params)(jax.random.PRNGKey(_KEY))
    state = jax.jit(agent.initial_learner_state)(jax.random.PRNGKey(1), params)
    tree = {"params": params, "learner_state": state}
    cpu, device = devices()
    passed = True
    for source, target in ((device, cpu), (cpu, device)):
        with tempfile.TemporaryDirectory() as folder:
            path = checkpoint.save(folder, 0, jax.device_put(tree, source), {})
            restored = checkpoint.restore(path, jax.device_put(tree, target))
        passed &= _equal(restored, tree)
        passed &= all(leaf.devices() == {target} for leaf in jax.tree.leaves(restored))
    return {"passed": bool(passed), "bytes": sum(x.nbytes for x in jax.tree.leaves(tree))}


def _equal(left: PyTree, right: PyTree) -> bool:
    pairs = zip(jax.tree.leaves(left), jax.tree.leaves(right), strict=True)
    return all(jnp.array_equal(np.asarray(a), np.asarray(b)) for a, b in pairs)


def _made(experiment: Experiment, *, greedy: bool = False) -> tuple[EnvSpec, Agent]:
    spec = spec_of(experiment)
    return spec, make_agent(experiment, spec, greedy=greedy)
