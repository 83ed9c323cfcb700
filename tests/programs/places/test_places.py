"""An error that passes a user's file names the file, the line and its code, once.

The first mistake in a function is quick, and so is one in each place where functions run.
"""

import dataclasses
import io
import re
from typing import NamedTuple

import pytest

from rlstack.programs.__main__ import main
from rlstack.programs.config.presets import preset
from rlstack.programs.run import train
from tests.programs.places import sources

pytestmark = pytest.mark.timeout(120)
LATER = [pytest.mark.slow, pytest.mark.chosen]
RAISE = 'raise LookupError("planned")'
SMALL = ("--frames", "400", "--log-period", "100", "--evaluator.episodes", "2")
SMALL += ("--evaluator.num-envs", "2")


class Mistake(NamedTuple):
    """A mistake in one function of a user's file."""

    slot: str
    code: str = RAISE
    text: str = "planned"  # of the message


class File(NamedTuple):
    """A user's file, and the command that runs it; M is the name of its module."""

    source: str
    command: str


OWN = File(sources.AGENT, "M-own --module M")
EPOCHS = File(sources.AGENT, "M-epochs --module M")


def part(options, preset="cartpole-dqn"):
    return File(sources.PARTS, f"{preset} --replay.min-size 100 {options}")


def env(options):
    return File(sources.ENVS, f"cartpole-ppo --env.num-envs 4 --replay.batch-size 4 {options}")


def cases(table, quick=None):
    """The cases as parameters. Quick is the first of each slot, or of each slot in `quick`."""
    found, seen = [], set()
    for case in table:
        values = case if type(case) is tuple else (case,)
        slot = values[-1].slot
        is_quick = slot not in seen and (quick is None or slot in quick)
        found.append(pytest.param(*values, marks=() if is_quick else LATER))
        seen.add(slot)
    return found


AGENT = [
    Mistake("top", "import numpyy", "numpyy"),
    Mistake("top", "from rlstack.math import lambda_return", "lambda_return"),
    Mistake("config", "self.require_at_least(1, 'rat')", "rat"),
    Mistake("init", "self.optimizer = optax.adam(cfg.learning_rate)", "learning_rate"),
    Mistake("init"),
    Mistake("initial_params", "return self.network.init()", "rng_key"),
    Mistake("initial_state"),
    Mistake("reset_state", "state = state['counts']", "tuple indices"),
    Mistake("initial_learner_state"),
    Mistake("actor_step", "distributions.from_parameters(self.action_spec, output.value)", "["),
    Mistake("actor_step", "output = output.logits", "logits"),
    Mistake("loss", "returns.lambda_returns(after.reward, discount[1:], output.value, 0.9, mask)"),
    Mistake("loss", "returns.lambda_returns(after.reward, discount, output.value[1:], 0.9, mask)"),
    Mistake("loss", "error = output.value - after.reward", "shapes"),
    Mistake("loss", "if after.reward.sum() > 0: pass", "bool"),
    Mistake("compute_gradients"),
    Mistake("compute_gradients", "batch = batch.timestep", "timestep"),
    Mistake("apply_gradients", "grads = grads + 1", "dict"),
    Mistake("update_learner_state"),
    Mistake("exploration"),
    Mistake("exploration", "distribution.log_prob()", "log_prob"),
    Mistake("network_function", "cfg.hidden", "hidden"),
    Mistake("transform", "updates = params['no such module']", "no such module"),
    Mistake("preset"),
    Mistake("preset", "like('cartpole-pppo', name)", "cartpole-pppo"),
]

IN_EPOCHS = [
    Mistake("prepare"),
    Mistake("prepare", "batch.trajectory.timestep.reward.reshape(3)", "reshape"),
    Mistake("epoch_loss"),
    Mistake("epoch_loss", "jnp.concatenate(rows.advantages, rows.returns)", "rows"),
]
WRONG_ARGUMENTS = [
    ("def initial_params(self, rng_key):", "def initial_params(self):"),
    ("def initial_state(self, batch_size):", "def initial_state(self):"),
    ("def actor_step(self, rng_key, params, timestep, state):",
     "def actor_step(self, params, timestep, state):"),
    ("def compute_gradients(self, params, learner_state, batch):",
     "def compute_gradients(self, params, batch):"),
    ("def own_network(obs_spec, action_spec, cfg, **rest):", "def own_network(obs_spec, cfg):"),
    ("def prepare(self, params, learner_state, batch):", "def prepare(self, params, batch):"),
    ("def loss(self, params, rows):", "def loss(self, params):"),
]  # fmt: skip
PARTS = [
    ("--network-factory M:network", Mistake("top_of_parts", "import jax.numpyy", "numpyy")),
    ("--network-factory M:network", Mistake("network_factory")),
    ("--network-factory M:network", Mistake("network_apply")),
    ("--network-factory M:haiku_network", Mistake("haiku_module")),
    ("--network-factory M:haiku_network", Mistake("haiku_module", "hk.Linear()(observation)")),
    ("--replay.sampler-factory M:Sampler", Mistake("sampler_init")),
    ("--replay.sampler-factory M:Sampler", Mistake("sampler")),
    ("--replay.sampler-factory M:Sampler", Mistake("sampler", "items.priorities", "priorities")),
    ("--replay.item-processor M:Items", Mistake("processor_init")),
    ("--replay.item-processor M:Items", Mistake("processor")),
    ("--replay.item-processor M:Items", Mistake("processor", "episode.steps", "steps")),
    ("--observation-processor M:view", Mistake("observation_processor")),
    ("--observation-processor M:view", Mistake("observation_processor", "observation['x']")),
    ("--step-processor M:Steps", Mistake("step_processor_init")),
    ("--step-processor M:Steps", Mistake("step_processor")),
    ("--step-processor M:Steps", Mistake("step_processor", "return step.replace(rewards=0)")),
    ("--policy-factory M:policy", Mistake("policy_factory")),
    ("--policy-factory M:policy", Mistake("policy")),
    ("--policy-factory M:policy", Mistake("policy", "return distribution.sample()", "rng_key")),
    ("--stop.factory M:Rule", Mistake("rule_init")),
    ("--evaluator.factory M:Judge", Mistake("evaluator_init")),
    ("--evaluator.factory M:Judge", Mistake("evaluator")),
    ("--agent.rule M:rule", Mistake("scripted_rule")),
]
GO_ON = [
    ("--loggers jsonl M:Lines", Mistake("logger_init")),
    ("--loggers jsonl M:Lines", Mistake("logger")),
    ("--loggers jsonl M:Lines", Mistake("logger_close")),
    ("--stop.factory M:Rule", Mistake("rule")),
    ("--stop.factory M:Rule", Mistake("rule", "logs['no such log']")),
]
POOLS = {  # pool: the slots that have a quick test there
    "--env.type for_loop": None,
    "--env.type thread": ("env_step",),
    "--env.type thread --env.wait-num 2": (),
    "--env.type process --env.num-workers 1 --env.max-restarts 0": ("env_step",),
}
ENVS = [
    ("--env.name M:Env", Mistake("env_init")),
    ("--env.name M:Env", Mistake("env_reset")),
    ("--env.name M:Env", Mistake("env_step")),
    ("--env.name M:Env", Mistake("env_step", "action['move']")),
    ("--env.name M:wrapped", Mistake("env_function")),
    ("--env.name M:wrapped", Mistake("env_wrapper")),
]
JAX_ENVS = [Mistake("jax_init"), Mistake("jax_spec"), Mistake("jax_reset"), Mistake("jax_step")]
JAX_ENVS += [Mistake("jax_step", "state = state['time']")]
JAX_TOPOLOGIES = {"single_process": None, "fused": ("jax_step",)}
GAMES = [
    ("--env.name M:pair", Mistake("game_reset")),
    ("--env.name M:pair", Mistake("game_step")),
    ("--env.name M:fires", Mistake("entity_reset")),
    ("--env.name M:fires", Mistake("entity_act")),
]
ZOO = "--env.name rlstack.envs.seats.pettingzoo:"
ZOOS = [
    (f"{ZOO}Parallel --env.options game M:Zoo", Mistake("zoo_init")),
    (f"{ZOO}Parallel --env.options game M:Zoo", Mistake("zoo_space")),
    (f"{ZOO}Parallel --env.options game M:Zoo", Mistake("zoo_reset")),
    (f"{ZOO}Parallel --env.options game M:Zoo", Mistake("zoo_step")),
    (f"{ZOO}Parallel --env.options game M:Zoo", Mistake("zoo_step", "actions['c']", "'c'")),
    (f"{ZOO}AEC --env.options game M:InTurn", Mistake("turn_reset")),
    (f"{ZOO}AEC --env.options game M:InTurn", Mistake("zoo_observe")),
    (f"{ZOO}AEC --env.options game M:InTurn", Mistake("turn_last")),
    (f"{ZOO}AEC --env.options game M:InTurn", Mistake("turn_step")),
]


def place(tmp_path, module, file, mistake):
    """Writes the user's file; returns "FILE:LINE: CODE" of the mistake."""
    source = file.source.replace("NAME", module)
    before = mistake.slot if mistake.slot.startswith("def ") else f"pass  # {mistake.slot}\n"
    assert source.count(before) == 1
    source = source.replace(before, mistake.code + "\n" * before.endswith("\n"))
    path = tmp_path / f"{module}.py"
    path.write_text(source)
    lines = [i for i, line in enumerate(source.splitlines(), 1) if line.strip() == mistake.code]
    return f"{path}:{lines[0]}: {mistake.code}"


COUNT = iter(range(10**6))


def message(tmp_path, monkeypatch, capsys, file, mistake, *more):
    """Runs the command; returns the place of the mistake, and the standard error."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    module = f"user{next(COUNT)}"
    where = place(tmp_path, module, file, mistake)
    args = re.sub(r"\bM\b", module, file.command).split()
    code = main(["train", args[0], *SMALL, "--run-dir", str(tmp_path / "run"), *args[1:], *more])
    return code, where, capsys.readouterr().err


def ids(case):
    return f"{case.slot}-{case.code[:30]}" if isinstance(case, Mistake) else None


@pytest.mark.parametrize("mistake", cases(AGENT), ids=ids)
def test_an_agent_in_this_process(tmp_path, monkeypatch, capsys, mistake):
    code, where, told = message(tmp_path, monkeypatch, capsys, OWN, mistake)
    check(code, where, told, mistake)


@pytest.mark.parametrize("mistake", cases(IN_EPOCHS), ids=ids)
def test_an_agent_with_epochs(tmp_path, monkeypatch, capsys, mistake):
    check(*message(tmp_path, monkeypatch, capsys, EPOCHS, mistake), mistake)


@pytest.mark.parametrize(
    ("before", "after"),
    [*WRONG_ARGUMENTS[:1], *(pytest.param(*case, marks=LATER) for case in WRONG_ARGUMENTS[1:])],
)
def test_a_function_of_other_arguments(tmp_path, monkeypatch, capsys, before, after):
    mistake = Mistake(before, after, "argument")
    file = EPOCHS if "prepare" in before or "rows" in before else OWN
    check(*message(tmp_path, monkeypatch, capsys, file, mistake), mistake)


@pytest.mark.parametrize(("options", "mistake"), cases(PARTS), ids=ids)
def test_a_part_in_this_process(tmp_path, monkeypatch, capsys, options, mistake):
    file = part(options, "cartpole-scripted" if "rule M" in options else "cartpole-dqn")
    check(*message(tmp_path, monkeypatch, capsys, file, mistake), mistake)


@pytest.mark.parametrize(("options", "mistake"), cases(GO_ON), ids=ids)
def test_a_part_without_which_a_run_goes_on(tmp_path, monkeypatch, capsys, options, mistake):
    code, where, told = message(tmp_path, monkeypatch, capsys, part(options), mistake)
    print(told)
    assert code == 0
    assert told.count(where) == 1
    assert "Traceback" not in told


@pytest.mark.parametrize(
    ("pool", "options", "mistake"),
    [p for pool, quick in POOLS.items() for p in cases([(pool, *row) for row in ENVS], quick)],
    ids=ids,
)
def test_an_environment(tmp_path, monkeypatch, capsys, pool, options, mistake):
    check(*message(tmp_path, monkeypatch, capsys, env(f"{options} {pool}"), mistake), mistake)


@pytest.mark.parametrize(
    ("topology", "mistake"),
    [p for t, quick in JAX_TOPOLOGIES.items() for p in cases([(t, m) for m in JAX_ENVS], quick)],
    ids=ids,
)
def test_an_environment_in_jax(tmp_path, monkeypatch, capsys, topology, mistake):
    options = f"--env.name M:Env --env.type jax --topology {topology}"
    file = env(options)._replace(source=sources.JAX_ENVS)
    check(*message(tmp_path, monkeypatch, capsys, file, mistake), mistake)


@pytest.mark.slow
@pytest.mark.chosen
@pytest.mark.parametrize(("options", "mistake"), cases(ZOOS), ids=ids)
def test_an_environment_of_pettingzoo(tmp_path, monkeypatch, capsys, options, mistake):
    file = env(f"{options} --env.type thread")._replace(source=sources.ZOO)
    check(*message(tmp_path, monkeypatch, capsys, file, mistake), mistake)


@pytest.mark.parametrize(("options", "mistake"), cases(GAMES), ids=ids)
def test_a_game(tmp_path, monkeypatch, capsys, options, mistake):
    file = env(f"{options} --env.type thread")._replace(source=sources.GAMES)
    if "entity" in mistake.slot:
        file = file._replace(command=file.command.replace("cartpole", "entity-move-to-origin"))
    check(*message(tmp_path, monkeypatch, capsys, file, mistake), mistake)


def check(code, where, told, mistake):
    print(told)
    assert code == 1
    line = told.strip().splitlines()[-1]
    assert told.count(where) == 1
    assert where in line
    assert mistake.text in line or mistake.text == "planned"
    assert "Traceback" not in told


CALLBACK = """
class Watcher:
    def on_update(self, update, logs):
        logs["no such log"]
"""


@pytest.mark.slow
@pytest.mark.chosen
def test_a_callback_that_fails_is_told_with_its_line(tmp_path, monkeypatch):
    (tmp_path / "watcher.py").write_text(CALLBACK)
    monkeypatch.syspath_prepend(str(tmp_path))
    import watcher

    experiment = dataclasses.replace(preset("cartpole-ppo"), frames=600)
    stream = io.StringIO()
    train.run(experiment, tmp_path / "run", callbacks=[watcher.Watcher()], stream=stream)
    told = f"Watcher.on_update raised KeyError: 'no such log' (in {tmp_path / 'watcher.py'}:4: "
    assert stream.getvalue().count(f'{told}logs["no such log"]); the run goes on.') == 1


# Where each of them runs in a program: the learner's node, an actor's, a service's, the replay's.
NODES = [
    (OWN, Mistake("init")),
    (OWN, Mistake("loss", "returns.lambda_returns(after.reward, discount[1:], output.value, 1.0)")),
    (OWN, Mistake("actor_step")),
    (OWN, Mistake("actor_step", "output = output.logits", "logits")),
    (part("--step-processor M:Steps"), Mistake("step_processor")),
    (part("--evaluator.factory M:Judge"), Mistake("evaluator")),
    (part("--replay.sampler-factory M:Sampler"), Mistake("sampler")),
    (part("--replay.item-processor M:Items"), Mistake("processor")),
    (env("--env.name M:Env --env.type thread"), Mistake("env_step")),
    (env("--env.name M:Env --env.type process --env.max-restarts 0"), Mistake("env_step")),
    (env("--env.name M:Env --env.type process --env.max-restarts 0"), Mistake("env_reset")),
]
HEAVY = "--topology heavy_env --program.num-actors 2 --program.max-restarts 0"
LIGHT = "--topology light_env --program.num-actors 2 --program.max-restarts 0"
DISTRIBUTED = "--topology distributed --program.num-actors 2 --program.max-restarts 0"
DISTRIBUTED += " --replay.service table"


@pytest.mark.slow
@pytest.mark.chosen
@pytest.mark.parametrize(
    ("file", "mistake"), cases(NODES, ("loss", "evaluator", "env_step")), ids=ids
)
def test_in_threads_of_nodes(tmp_path, monkeypatch, capsys, file, mistake):
    more = f"{HEAVY} --launch threads".split()
    check_node(*message(tmp_path, monkeypatch, capsys, file, mistake, *more), mistake)


@pytest.mark.slow
@pytest.mark.parametrize("topology", [HEAVY, LIGHT, DISTRIBUTED])
@pytest.mark.parametrize(("file", "mistake"), NODES, ids=ids)
def test_in_processes_of_nodes(tmp_path, monkeypatch, capsys, topology, file, mistake):
    check_node(*message(tmp_path, monkeypatch, capsys, file, mistake, *topology.split()), mistake)


def check_node(code, where, told, mistake):
    print(told)
    assert code == 1
    (line,) = [x for x in told.splitlines() if x.startswith("rlstack train: ")]
    assert where in line
    assert mistake.text in line or mistake.text == "planned"
