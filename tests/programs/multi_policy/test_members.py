"""Which policy plays which seats, and its own experiment."""

import dataclasses

import pytest

from rlstack.agents.bc import BCConfig
from rlstack.agents.fixed import RandomConfig
from rlstack.agents.ppo import PPOConfig
from rlstack.programs.build.policies.members import divide
from rlstack.programs.config.encoding import from_json, to_json
from rlstack.programs.config.member_config import HistoryConfig, MemberConfig
from rlstack.programs.config.presets import preset
from tests.programs.multi_policy.cases import CHAIN, DQN, PAST, RULE, chain, selfplay, small

FIRST, SECOND = MemberConfig(seats=(0,)), MemberConfig(seats=("distributor", "factory"))


def test_seats_are_numbers_or_names_or_those_that_are_left():
    division = divide(chain())
    assert division.seat_names == ("retailer", "distributor", "factory")
    assert {name: member.seats for name, member in division.members.items()} == {
        "retailer": (0,),
        "distributor": (1,),
        "factory": (2,),
    }
    assert [member.kind for member in division.members.values()] == ["learning"] * 2 + ["fixed"]
    assert division.members["distributor"].rows(6, 3) == [1, 4]
    division = divide(small(CHAIN, {"shop": FIRST, "others": SECOND}, 4))
    assert division.members["others"].seats == (1, 2)
    assert division.members["others"].rows(6, 3) == [1, 2, 4, 5]
    assert division.members["others"].experiment.env.num_envs == 8


def test_each_policy_has_an_experiment_and_random_numbers_of_its_own():
    members = divide(chain(seed=7)).members
    own = {name: member.experiment for name, member in members.items()}
    assert own["retailer"].seed == 7
    assert len({experiment.seed for experiment in own.values()}) == 3
    assert isinstance(own["retailer"].agent, PPOConfig)
    assert own["distributor"].agent == DQN
    assert own["distributor"].network == own["retailer"].network
    assert own["factory"].agent == RULE
    assert not any(experiment.policies for experiment in own.values())


def test_history_has_the_agent_of_the_policy_that_it_follows():
    experiment = selfplay()
    learner = dataclasses.replace(experiment.policies["learner"], agent=DQN)
    policies = {**experiment.policies, "learner": learner}
    members = divide(dataclasses.replace(experiment, policies=policies)).members
    assert members["past"].kind == "history"
    assert members["past"].experiment.agent == DQN


@pytest.mark.parametrize(
    ("policies", "words"),
    [
        ({"a": MemberConfig(seats=("shop",))}, r"policies.a: seats must be among.*retailer"),
        ({"a": MemberConfig(seats=(3,))}, r"policies.a: seats must be among 0 to 2.*got 3"),
        ({"a": FIRST}, r"\[1, 2\] have none"),
        ({"a": MemberConfig(seats=(0, 1)), "b": SECOND}, r"\[1\] have several"),
        ({"a": MemberConfig(seats=(0, 1, 2)), "b": MemberConfig()}, "no seat is left"),
        ({"a": MemberConfig(agent=RandomConfig())}, "at least one of the policies must learn"),
        ({"a": FIRST, "b": PAST}, "policies.b: history.of must be a policy that learns"),
        ({"a": MemberConfig(agent=BCConfig())}, "BC learns from recorded data only"),
    ],
)
def test_sets_that_do_not_fit_are_refused(policies, words):
    with pytest.raises(ValueError, match=words):
        divide(small(CHAIN, policies, 4))


def test_the_environments_must_be_whole_games():
    env = dataclasses.replace(CHAIN, num_envs=10)
    with pytest.raises(ValueError, match="whole games of 3 seats"):
        divide(dataclasses.replace(chain(), env=env))


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"topology": "fused"}, "env.type must be jax in the topology fused"),
        ({"env": dataclasses.replace(CHAIN, wait_num=3)}, "wait_num must be 0 with policies"),
        ({"policies": {"a b": FIRST}}, "must have names like Python's"),
    ],
)
def test_what_several_policies_exclude(changes, words):
    with pytest.raises(ValueError, match=words):
        dataclasses.replace(chain(), **changes)


def test_a_policy_is_one_thing():
    with pytest.raises(ValueError, match="at most one of run"):
        MemberConfig(run="runs/x", agent=DQN)
    with pytest.raises(ValueError, match="run_policy must be empty without run"):
        MemberConfig(run_policy="x")
    with pytest.raises(ValueError, match="max_versions must be at least 2"):
        HistoryConfig(max_versions=1)


def test_configs_with_policies_are_read_as_they_were_written():
    for experiment in (chain(), selfplay(), preset("supply-chain-policies")):
        assert from_json(to_json(experiment)) == experiment
    text = to_json(chain()).replace('"factory": {', '"factory": {"seat": 1,')
    with pytest.raises(ValueError, match="seat"):
        from_json(text)
