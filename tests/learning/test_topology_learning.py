"""The learned return does not depend on the topology: CartPole, in processes, fixed seeds.

An asynchronous program learns from frames in random order, so a run may take up to twice the
frames of a single process. ``python -m tests.learning.test_topology_learning`` prints the table of
docs/topologies.md.
"""

import dataclasses
import io
import pathlib
import sys
import tempfile

import pytest

from rlstack.configs.acting import EvaluatorConfig
from rlstack.programs.config.experiment import ProgramConfig
from rlstack.programs.config.presets import preset
from rlstack.programs.run import train

TOPOLOGIES = ("heavy_env", "light_env", "distributed")
SOLVED = 475.0


def experiment(agent, topology, pool):
    """The preset, with twice its frames and two actors."""
    single = preset(f"cartpole-{agent}")
    num_envs = single.env.num_envs
    wait_num = num_envs // 2 if pool == "async" else 0
    # Twice the frames with the same number of updates per frame, so annealing also takes longer.
    learner = single.agent
    anneal = 2 * learner.optimizer.anneal_steps
    optimizer = dataclasses.replace(learner.optimizer, anneal_steps=anneal)
    frames = 2 * single.frames
    return dataclasses.replace(
        single,
        topology=topology,
        frames=frames,
        agent=dataclasses.replace(learner, optimizer=optimizer),
        env=dataclasses.replace(single.env, wait_num=wait_num, num_workers=1),
        evaluator=EvaluatorConfig(episodes=20, num_envs=10),
        program=ProgramConfig(num_actors=2),
    )


def run(agent, topology, pool, directory):
    """Trains in processes; returns the result."""
    return train.run(experiment(agent, topology, pool), directory, stream=io.StringIO())


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("pool", ["sync", "async"])
@pytest.mark.parametrize("topology", TOPOLOGIES)
@pytest.mark.parametrize("agent", ["ppo", "dqn"])
def test_cartpole_is_solved_in_every_topology(tmp_path, agent, topology, pool):
    assert run(agent, topology, pool, tmp_path / "run").eval_return_mean >= SOLVED


def main(wanted):
    """Prints a row for each run whose name contains all the words."""
    print("| agent | topology | pool | return | frames | updates | seconds |")
    print("| --- | --- | --- | --- | --- | --- | --- |")
    for agent in ("ppo", "dqn"):
        for topology in TOPOLOGIES:
            for pool in ("sync", "async"):
                if not set(wanted) <= {agent, topology, pool}:
                    continue
                with tempfile.TemporaryDirectory() as folder:
                    found = run(agent, topology, pool, pathlib.Path(folder) / "run")
                print(
                    f"| {agent} | {topology} | {pool} | {found.eval_return_mean:.1f} | "
                    f"{found.env_frames:,} | {found.learner_steps:,} | {found.wall_seconds:.0f} |",
                    flush=True,
                )


if __name__ == "__main__":
    main(sys.argv[1:])
