import dataclasses
import json
import math
import re
from typing import get_args

import numpy as np
import pytest

from rlstack.agents.bc import BCConfig
from rlstack.agents.fixed import RandomConfig
from rlstack.checks import WrongKindError, hints_of, is_config
from rlstack.networks import NetworkConfig
from rlstack.programs.build.agent import make_agent
from rlstack.programs.build.environments import make_env
from rlstack.programs.config import own_modules
from rlstack.programs.config.encoding import from_json, to_json
from rlstack.programs.config.experiment import EnvConfig, Experiment, ProgramConfig
from rlstack.programs.config.layouts import LAYOUTS, Topology
from rlstack.programs.config.presets import PRESETS, describe, preset
from rlstack.programs.config.stop_config import StopConfig
from rlstack.programs.session.run_config import read_config
from rlstack.programs.session.run_dir import RunDir
from rlstack.references import load_object


@pytest.mark.parametrize("name", list(PRESETS))
def test_a_preset_survives_json(name):
    experiment = preset(name)
    assert from_json(to_json(experiment)) == experiment
    assert experiment.preset == name
    assert len(describe(name)) > 10


def test_json_names_the_agent_and_refuses_unknown_fields():
    text = to_json(preset("cartpole-ppo"))
    assert '"kind": "PPOConfig"' in text
    with pytest.raises(ValueError, match="did you mean 'PPOConfig'"):
        from_json(text.replace("PPOConfig", "PPOConfg"))
    with pytest.raises(ValueError, match="needs --module") as raised:
        from_json(text.replace("PPOConfig", "MineConfig"))
    assert "cattrs" not in str(raised.value)
    with pytest.raises(ValueError, match="clip_ration"):
        from_json(text.replace("clip_ratio", "clip_ration"))
    with pytest.raises(ValueError, match="discount must be in"):
        from_json(text.replace('"discount": 0.98', '"discount": 1.98'))


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("\udcff", "can't decode byte 0xff"),
        ("", r"Expecting value: line 1 column 1 \(char 0\)"),
        ('{"preset": ', "Expecting value"),
        ("[" * 100_000, "recursion"),
        ('["not rlstack"]', r"got \['not rlstack'\]"),
        ("null", "got None"),
        ("{}", "preset"),
        ('{"modules": "one"}', "modules must be a list of names; got 'one'"),
        ('{"modules": [1]}', r"modules must be a list of names; got \[1\]"),
        ('{"env": 5}', "env"),
        ('{"agent": [], "learner": {"num_devices": "two"}}', "agent.*learner"),
    ],
)
def test_a_text_that_is_no_config_is_refused_with_the_name_of_its_file(tmp_path, text, why):
    directory = RunDir.create(tmp_path / "run", "", 1)
    directory.config.write_text(text, errors="surrogateescape")
    start = f"^{re.escape(str(directory.config))}: not the config of an experiment"
    with pytest.raises(ValueError, match=f"{start}.*{why}") as raised:
        read_config(directory)
    assert "\n" not in str(raised.value) and len(str(raised.value)) < 1200


def test_an_unknown_preset_suggests_the_nearest():
    with pytest.raises(ValueError, match="did you mean 'cartpole-ppo'"):
        preset("cartpol-ppo")
    with pytest.raises(
        ValueError, match=r"there are .*, pendulum-ppo, .*rlstack presets lists all"
    ):
        preset("ppo")


def configs_in(config):
    yield config
    for field in dataclasses.fields(config):
        if is_config(inner := getattr(config, field.name)):
            yield from configs_in(inner)


# One config of each type that occurs in a preset.
CONFIGS = {type(one): one for name in PRESETS for one in configs_in(preset(name))}


@pytest.mark.parametrize("config", CONFIGS.values(), ids=lambda config: type(config).__name__)
def test_a_config_names_its_field_of_a_wrong_type(config):
    numbers = [name for name, hint in hints_of(config).items() if hint in (int, float)]
    for name in numbers:
        with pytest.raises(WrongKindError, match=rf"^{type(config).__name__}: {name} must be a "):
            dataclasses.replace(config, **{name: "7"})


@pytest.mark.parametrize(
    ("change", "rule"),
    [
        ({"type": "jx"}, r"EnvConfig: type must be one of auto, .*; got 'jx'"),
        ({"num_envs": 2.0}, r"EnvConfig: num_envs must be a whole number; got 2\.0"),
        ({"options": [1]}, r"EnvConfig: options must be a dict; got \[1\]"),
        ({"name": b"A-v1"}, r"EnvConfig: name must be text; got b'A-v1'"),
    ],
)
def test_a_wrong_type_of_the_environment_is_refused(change, rule):
    with pytest.raises(WrongKindError, match=rule):
        EnvConfig(**{"name": "A-v1", "num_envs": 1} | change)


@pytest.mark.parametrize(
    ("change", "rule"),
    [
        ({"frames": 0}, "frames must be at least 1"),
        ({"seed": -1}, r"seed must be in \[0, 2\^31\)"),
        ({"log_period": 0}, "log_period must be at least 1"),
        ({"frames": 1e6}, r"frames must be a whole number; got 1000000\.0"),
        ({"frames": "9"}, "frames must be a whole number; got '9'"),
        ({"hours": None}, "hours must be a number; got None"),
        ({"topology": "nope"}, "topology must be one of single_process, fused, .*; got 'nope'"),
        ({"checkpoint_replay": "no"}, "checkpoint_replay must be True or False; got 'no'"),
        ({"loggers": "jsonl"}, "loggers must be a tuple; got 'jsonl'"),
        ({"agent": RandomConfig}, r"agent must be .*Write RandomConfig\(\)"),
        ({"policies": {"one": None}}, r"policies\.one must be a MemberConfig; got None"),
    ],
)
def test_out_of_range_values_name_the_rule(change, rule):
    with pytest.raises(ValueError, match=rule):
        dataclasses.replace(preset("cartpole-ppo"), **change)


@pytest.mark.parametrize(
    ("config", "field"),
    [
        (BCConfig, "min_log_std"),
        (NetworkConfig, "policy_log_std"),
        (StopConfig, "return_reached"),
    ],
)
@pytest.mark.parametrize("value", [math.nan, -math.inf])
def test_values_that_are_no_numbers_are_refused(config, field, value):
    with pytest.raises(ValueError, match=f"{field} must be finite; got {value}"):
        config(**{field: value})


def test_numbers_of_numpy_are_numbers():
    base = preset("cartpole-ppo")
    env = dataclasses.replace(base.env, options={"length": np.float32(0.5)})
    found = dataclasses.replace(base, seed=np.int64(3), env=env)
    assert from_json(to_json(found)) == found


@pytest.mark.parametrize("name", ["cartpole-ppo", "pong-impala"])
def test_plain_batch_norm_is_refused_where_learning_is_compared_with_acting(name):
    experiment = preset(name)
    for norm in ("layer", "batch_renorm"):
        network = dataclasses.replace(experiment.network, norm=norm)
        dataclasses.replace(experiment, network=network)
    with pytest.raises(ValueError, match=r"norm must not be batch with \w+.*Use .* batch_renorm"):
        dataclasses.replace(experiment, network=dataclasses.replace(network, norm="batch"))


def test_env_config_checks_the_batch_of_an_asynchronous_pool():
    with pytest.raises(ValueError, match=r"wait_num must be in 0\.\.num_envs"):
        EnvConfig("CartPole-v1", num_envs=4, wait_num=5)


def test_objects_are_found_by_reference():
    assert load_object("rlstack.programs.config.experiment:Experiment") is Experiment
    with pytest.raises(ValueError, match="no module 'no_such_module'"):
        load_object("no_such_module:thing")
    with pytest.raises(ValueError, match="no module 'no_such_package'; run where"):
        load_object("no_such_package.within:thing")
    with pytest.raises(ValueError, match=r"no module 'json\.no_such'"):
        load_object("json.no_such:thing")
    with pytest.raises(ValueError, match="did you mean 'Experiment'"):
        load_object("rlstack.programs.config.experiment:Experimnt")


def test_a_policy_factory_chooses_the_actions_of_training_alone():
    experiment = dataclasses.replace(
        preset("cartpole-dqn"), policy_factory="rlstack.exploration:Sample"
    )
    assert from_json(to_json(experiment)) == experiment
    with make_env(experiment.env, 0) as env:
        assert type(make_agent(experiment, env.spec).policy).__name__ == "Sample"
        assert type(make_agent(experiment, env.spec, greedy=True).policy).__name__ == "Greedy"


def test_a_config_with_a_number_of_devices_names_the_first_ones():
    experiment = preset("cartpole-ppo")
    for count, devices in ((1, ()), (2, (0, 1))):
        tree = json.loads(to_json(experiment))
        del tree["learner"]["devices"]
        tree["learner"]["num_devices"] = count
        assert from_json(json.dumps(tree)).learner.devices == devices


def test_a_config_of_an_earlier_version_may_have_on_loss_as_an_option_of_ray():
    tree = json.loads(to_json(preset("cartpole-ppo")))
    assert "on_loss" not in tree["program"]["ray"]
    for ray in ("end", "resume"):
        old = json.loads(json.dumps(tree))
        del old["program"]["on_loss"]
        old["program"]["ray"] |= {"on_loss": ray, "lost_seconds": 7.0}
        program = from_json(json.dumps(old)).program
        assert (program.on_loss, program.ray.lost_seconds) == (ray, 7.0)


@pytest.mark.parametrize("launch", ["threads", "hosts"])
def test_programs_that_cannot_start_again_refuse_to_resume_by_themselves(launch):
    with pytest.raises(ValueError, match="on_loss must be end with launch threads"):
        ProgramConfig(launch=launch, on_loss="resume")


def test_every_topology_has_a_layout():
    assert set(LAYOUTS) == set(get_args(Topology))


def test_agents_of_installed_packages_are_looked_for_where_a_config_names_them(monkeypatch):
    looked = []
    monkeypatch.setattr(own_modules, "load_entry_points", looked.append)
    text = to_json(preset("cartpole-ppo"))
    from_json(text)
    assert looked == []
    with pytest.raises(ValueError, match="unknown kind of agent 'OthersConfig'"):
        from_json(text.replace('"PPOConfig"', '"OthersConfig"'))
    assert looked == [own_modules.AGENTS]


@pytest.mark.parametrize("kind", ["", "PPO(", ".*", "PPOConfig|DQNConfig"])
def test_a_kind_of_agent_is_a_name_and_no_pattern(kind):
    text = to_json(preset("cartpole-ppo")).replace('"PPOConfig"', f'"{kind}"')
    with pytest.raises(ValueError, match="not the config of an experiment: unknown kind of agent"):
        from_json(text)
