"""A learning rate that falls to 0 before the run ends is told once, in every topology."""

import dataclasses
import io
import json
import re

import numpy as np
import pytest

from rlstack.agents.ppo import PPOConfig
from rlstack.agents.td3 import TD3Config
from rlstack.optimizers import OptimizerConfig
from rlstack.optimizers.config import learning_rate
from rlstack.programs.config.experiment import EnvConfig
from rlstack.programs.config.fused_config import FusedConfig
from rlstack.programs.config.member_config import MemberConfig
from rlstack.programs.run import train
from rlstack.programs.session.stopping import LearningRates, expected_frames
from rlstack.programs.study import train as studies
from rlstack.programs.study.study import Study
from rlstack.storage.loggers import JsonlLogger
from tests.programs.multi_policy import cases
from tests.programs.running import TOPOLOGIES, metrics, nothing_left, ppo, small

# Programs in threads handle signals, so the time limit must not need one.
pytestmark = pytest.mark.timeout(120, method="thread")
_LATER = [pytest.mark.slow, pytest.mark.chosen]
_RATE = "learner/learning_rate"
_UPDATE, _UPDATES = 256, 160  # frames of an update; a program logs more than one line
_FRAMES = _UPDATE * _UPDATES


def falling(steps, **changes):
    """Returns an optimizer whose learning rate falls linearly from 0.01 to 0 over `steps` steps."""
    return OptimizerConfig(learning_rate=1e-2, anneal_steps=steps, **changes)


def of_optimizer(topology, optimizer, **changes):
    """PPO that makes one step of its optimizer in each update, for 160 updates."""
    agent = PPOConfig(num_epochs=1, num_minibatches=1, optimizer=optimizer)
    experiment = ppo("single_process" if topology == "fused" else topology, frames=_FRAMES)
    if topology == "fused":
        env = EnvConfig("rlstack.jax_envs.toy:Catch", 8, "jax")
        changes = {"env": env, "topology": topology, "fused": FusedConfig(0.01), **changes}
    changes = {"agent": agent, "log_period": _UPDATE, **changes}
    return dataclasses.replace(experiment, **changes)


def run(experiment, directory):
    """Runs to the end; returns what the display showed."""
    stream = io.StringIO()
    train.run(experiment, directory, stream=stream)
    return stream.getvalue()


def told(text):
    """The lines about learning rates."""
    return [line for line in text.splitlines() if "has been 0 since" in line]


def watch(experiment, **start):
    """Returns a `LearningRates` logger, and the list of lines that it shows the user."""
    lines = []
    return LearningRates(experiment, lines.append, **start), lines


def see(logger, rates, name=_RATE, period=100):
    """Writes a line of logs for each update's learning rate; ``period`` frames apart."""
    steps = name.rpartition("learner/")[0] + "learner/steps"
    for i, rate in enumerate(rates):
        logger.write(period * (i + 1), {name: rate, steps: i + 1})


OF_4_STEPS = [1e-2, 7.5e-3, 5e-3, 2.5e-3, 0.0, 0.0]  # from 0.01 to 0


def test_the_line_says_what_happened_and_what_to_do():
    logger, lines = watch(of_optimizer("single_process", falling(4), frames=1_000))
    see(logger, OF_4_STEPS)
    assert lines == [
        "learner/learning_rate has been 0 since about frame 400 of 1,000, so nothing is learned "
        "with it any more: agent.optimizer.anneal_steps is 4 and does not follow --frames. A new "
        "run of this length needs about --agent.optimizer.anneal-steps 10"
    ]


@pytest.mark.parametrize(
    ("optimizer", "changes"),
    [
        (falling(4), {"frames": 9_700}),  # the run ends with its schedule
        (falling(4), {"frames": 10**6, "updates": 97}),
        (falling(4, final_learning_rate=1e-12), {}),  # the user wants it so low
        (falling(0), {}),
        (falling(4, schedule="constant"), {}),
    ],
)
def test_nothing_is_told_of_a_learning_rate_that_ends_as_it_should(optimizer, changes):
    logger, lines = watch(of_optimizer("single_process", optimizer, **changes))
    see(logger, [5e-3] * 96 + [1e-6])
    assert lines == []


def test_a_warm_up_is_no_end():
    logger, lines = watch(of_optimizer("single_process", falling(100, warmup_steps=50)))
    see(logger, [0.0, 1e-6, 2e-6])
    assert lines == []
    logger.write(400, {_RATE: 1e-2, "learner/steps": 4})
    logger.write(500, {_RATE: 0.0, "learner/steps": 5})
    assert len(lines) == 1


def test_a_run_of_hours_has_the_frames_that_it_will_make():
    experiment = of_optimizer("single_process", falling(4), frames=10**9, hours=1.0)
    assert expected_frames(experiment, 600, 3, 360.0) == 6_000
    assert expected_frames(experiment, 0, 0, 0.0) == 10**9
    assert expected_frames(dataclasses.replace(experiment, updates=4), 600, 3, 360.0) == 800
    logger, lines = watch(experiment, start_seconds=3599.0)
    see(logger, [1e-2, 0.0], period=10_000)  # the hour has passed before this could be half of it
    assert "of 20,0" in lines[0]


def test_components_are_told_with_their_own_options():
    own = dataclasses.replace(
        of_optimizer("single_process", falling(0)).agent, value_head_optimizer=falling(4)
    )
    logger, lines = watch(of_optimizer("single_process", falling(0), agent=own))
    see(logger, [1e-2, 0.0], f"{_RATE}/value_head")
    (line,) = lines
    assert line.startswith("learner/learning_rate/value_head has been 0 since about frame 100 ")
    assert re.search(r"--agent\.value-head-optimizer\.anneal-steps \d+$", line)
    # TD3's policy makes fewer steps, but has the same option.
    shared = TD3Config(optimizer=falling(4))
    logger, lines = watch(of_optimizer("single_process", falling(0), agent=shared))
    for name in _RATE, f"{_RATE}/policy":
        see(logger, [1e-2, 0.0], name)
    assert len(lines) == 1


@pytest.mark.parametrize("optimizer", [falling(80), falling(80, schedule="cosine")])
@pytest.mark.parametrize("steps", [0.5, 1, 8])  # in an update; TD3's policy makes one in two
@pytest.mark.parametrize("updates", [1, 7, 60])  # between two lines of logs
@pytest.mark.parametrize("start", [0, 5_000])  # frames before the first update
def test_the_advised_steps_end_with_the_run_or_less_than_1_percent_after(
    optimizer, steps, updates, start
):
    total, in_run = 10_000 + start, 1_000  # an update every ten frames
    logger, lines = watch(of_optimizer("single_process", optimizer, frames=total))
    rates = np.asarray(learning_rate(optimizer)(np.arange(int(in_run * steps) + 1)))
    made = [[rates[int(i * steps) + j] for j in range(max(steps, 1))] for i in range(in_run)]
    for i in range(updates, in_run + 1, updates):
        mean = float(np.mean(made[i - updates : i]))
        logger.write(start + 10 * i, {_RATE: mean, "learner/steps": i})
    (line,) = lines
    advised = int(re.search(r"--agent\.optimizer\.anneal-steps (\d+)$", line)[1])
    assert steps * in_run <= advised < 1.01 * steps * in_run


def test_a_resumed_run_knows_the_lines_of_the_earlier_commands(tmp_path):
    experiment = of_optimizer("single_process", falling(4), frames=1_000)
    with_lines = JsonlLogger(tmp_path / "metrics.jsonl")
    see(with_lines, OF_4_STEPS)
    with_lines.close()
    start = {"start_frames": 600, "start_seconds": 1.0}
    logger, lines = watch(experiment, **start, earlier=tmp_path / "metrics.jsonl")
    logger.write(700, {_RATE: 0.0, "learner/steps": 7})
    assert "since about frame 400 of 1,000" in lines[0]
    assert lines[0].endswith("about --agent.optimizer.anneal-steps 10")
    logger, lines = watch(
        experiment, **start, earlier=tmp_path / "none"
    )  # without the logger jsonl
    logger.write(700, {_RATE: 0.0, "learner/steps": 7})
    assert "since frame 700 or an earlier one of 1,000" in lines[0]
    assert lines[0].endswith("a larger --agent.optimizer.anneal-steps")


@pytest.mark.slow
@pytest.mark.parametrize(
    "topology",
    [
        *(
            pytest.param(name, marks=pytest.mark.chosen)
            for name in ("single_process", "fused", "heavy_env")
        ),
        *TOPOLOGIES[1:],
    ],
)
def test_runs_tell_it_once(tmp_path, topology):
    with nothing_left():
        text = run(of_optimizer(topology, falling(40)), tmp_path / "run")
    (line,) = told(text)
    if topology in ("single_process", "fused"):  # in programs updates come at no fixed pace
        updates = json.loads((tmp_path / "run" / "result.json").read_text())["learner_steps"]
        assert updates <= int(line.split()[-1]) <= 1.01 * updates + 1
    frames = re.search(r"about frame ([\d,]+) of 40,960", line)[1].replace(",", "")
    # Nodes and calls of a compiled loop report some updates together. Catch begins an episode every
    # ten steps, which is no frame.
    assert 33 <= int(frames) / _UPDATE < 100
    rates = [found[_RATE] for found in metrics(tmp_path / "run") if _RATE in found]
    assert rates[0] > 1e-3 > 1e-8 > rates[-1]


@pytest.mark.slow
@pytest.mark.chosen
def test_runs_whose_schedule_fits_tell_nothing(tmp_path):
    assert told(run(of_optimizer("single_process", falling(_UPDATES)), tmp_path / "run")) == []


@pytest.mark.slow
@pytest.mark.chosen
def test_a_finished_run_that_gets_more_frames_is_told_of_the_end_of_its_schedule(tmp_path):
    first = of_optimizer("single_process", falling(8), frames=8 * _UPDATE)
    assert told(run(first, tmp_path / "run")) == []
    stream = io.StringIO()
    train.resume(tmp_path / "run", frames=20 * _UPDATE, stream=stream)
    (line,) = told(stream.getvalue())
    assert "about frame 2,050 of 5,120" in line
    assert line.endswith("about --agent.optimizer.anneal-steps 20")


@pytest.mark.slow
@pytest.mark.chosen
def test_seeds_in_one_program_tell_it_once(tmp_path):
    stream = io.StringIO()
    base = of_optimizer("fused", falling(40))
    studies.run(Study(base, (1, 2)), tmp_path / "set", stream=stream)
    assert len(told(stream.getvalue())) == 1


@pytest.mark.slow
@pytest.mark.chosen
@pytest.mark.parametrize("topology", ["single_process", pytest.param("heavy_env", marks=_LATER)])
def test_each_policy_is_told_of_by_its_name(tmp_path, topology):
    agents = [PPOConfig(num_epochs=1, num_minibatches=1, optimizer=falling(n)) for n in (2, 100)]
    policies = {
        "retailer": MemberConfig(seats=("retailer",), agent=agents[0]),
        "distributor": MemberConfig(seats=(1,), agent=agents[1]),
        "factory": MemberConfig(agent=cases.RULE),
    }
    experiment = cases.small(cases.CHAIN, policies, 4, frames=2_000)
    if topology != "single_process":
        experiment = small(experiment, topology, 2_000)
    (line,) = told(run(dataclasses.replace(experiment, log_period=100), tmp_path / "run"))
    assert line.startswith("retailer/learner/learning_rate has been 0 ")
    assert re.search(r"--policies\.retailer\.agent\.optimizer\.anneal-steps \d+$", line)


def test_policies_with_the_agent_of_the_experiment_have_its_option():
    policies = {name: MemberConfig(seats=(name,)) for name in ("retailer", "distributor")}
    policies["factory"] = MemberConfig(agent=cases.RULE)
    agent = PPOConfig(num_epochs=1, num_minibatches=1, optimizer=falling(2))
    logger, lines = watch(cases.small(cases.CHAIN, policies, 4, agent=agent, frames=1_000))
    for name in policies:
        see(logger, [1e-2, 5e-3, 0.0], f"{name}/{_RATE}")
    (line,) = lines
    assert line.startswith("retailer/learner/learning_rate has been 0 since about frame 200 of")
    assert line.endswith("--agent.optimizer.anneal-steps 10")


@pytest.mark.slow
def test_a_program_in_processes_keeps_the_line_in_the_output_of_its_coordinator(tmp_path):
    experiment = of_optimizer("heavy_env", falling(40), frames=4 * _FRAMES)
    program = dataclasses.replace(experiment.program, launch="processes")
    text = run(dataclasses.replace(experiment, program=program), tmp_path / "run")
    output = (tmp_path / "run" / "logs" / "coordinator" / "0").read_text()
    assert told(text) == told(output) != []
