"""PPO and DQN learn in one supply chain to pay less than with the base stock rule in all seats."""

import dataclasses

import numpy as np
import pytest

from rlstack.agents.rules import order_up_to_base_stock
from rlstack.envs.seats.supply_chain import SupplyChain
from rlstack.programs.config.presets import preset
from rlstack.programs.config.program_config import ProgramConfig
from tests.programs.running import run

STATED = -19.5  # return of an episode; docs/policies.md has the means over seeds


def return_of_rule(episodes=50):
    chain, total = SupplyChain(shared=1.0, seed=9), 0.0
    for _ in range(episodes):
        seen, last = chain.reset(), False
        while not last:
            step = chain.step(np.asarray(order_up_to_base_stock(np.stack(seen))))
            seen, last = step.observations, step.last
            total += np.mean(step.rewards)
    return total / episodes


@pytest.mark.slow
@pytest.mark.timeout(1200, method="thread")
@pytest.mark.parametrize("topology", ["single_process", "heavy_env", "distributed"])
def test_ppo_and_dqn_pay_less_than_the_rule(tmp_path, topology):
    experiment = preset("supply-chain-policies")
    if topology != "single_process":
        program = ProgramConfig(num_actors=2)
        experiment = dataclasses.replace(experiment, topology=topology, program=program)
    result = run(experiment, tmp_path / "run")
    assert return_of_rule() < STATED - 0.5
    for name in ("retailer", "distributor"):
        assert result.policies[name]["eval_return_mean"] >= STATED, name
