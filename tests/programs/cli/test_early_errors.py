"""A mistake is found before anything is imported that it does not need, so it is told at once."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[3]
JAX = {"jax", "haiku", "optax"}
ENVIRONMENTS = {"envpool", "gymnasium", "gymnax", "pettingzoo"}
RUN = {"orbax", "tensorboardX", "zmq", "ray", "matplotlib"}
MAIN = """
import contextlib, io, json, sys
from rlstack.programs.__main__ import main
found = []
for args in json.loads(sys.argv[1]):
    with contextlib.redirect_stderr(io.StringIO()) as told, contextlib.redirect_stdout(told):
        code = main(args)
    imported = sorted(set(json.loads(sys.argv[2])) & set(sys.modules))
    found.append([args, code, told.getvalue(), imported])
print(json.dumps(found))
"""
WITHOUT_JAX = {
    "trian cartpole-ppo": "did you mean 'train'?",
    "docter": "did you mean 'doctor'?",
    "train lqr": "rlstack presets lists all",
    "--module no_such_module train cartpole-ppo": "there is no such module",
    "train --frames 10": "a preset must come first",
    "train cartpole-pppo": "did you mean 'cartpole-ppo'?",
    "train no-such.json": "there is no file no-such.json",
    "train held": "held is a directory; a preset or a config file must come first",
    "train cartpole-ppo --module no_such_module": "there is no such module",
    "train --resume nowhere": "there is no such directory",
    "train --resume held": "it has no config.json",
    "train --resum held": "did you mean --resume?",
    "train --resume held --seed 3": "--seed must stay as it is",
    "sweep cartpole-pppo": "did you mean 'cartpole-ppo'?",
    "eval nowhere": "there is no such directory",
    "eval held --epsodes 3": "did you mean --episodes?",
    "record nowhere": "there is no such directory",
    "serve nowhere": "there is no such directory",
    "export nowhere --format npz": "there is no such directory",
    "report nowhere": "there is no such directory",
    "check agent cartpole-pppo": "did you mean 'cartpole-ppo'?",
    "train cartpole-ppo --agent.lr 1": "did you mean --agent.optimizer.learning-rate?",
    "train cartpole-ppo --agent.discount abc": "could not convert string to float",
    "train cartpole-ppo --frames 1.5": "must be a whole number",
    "train cartpole-ppo --network.hidden-sizes 64,64": "with spaces between them, such as 64 64",
    "train hopper-crossq --network.critic.hidden-sizes 64,64": "between them, such as 64 64; got",
    "train cartpole-ppo --topology ring": "invalid choice 'ring'",
    "sweep pendulum-sac --nosuch 1": "there is no option --nosuch",
}
# Its other checks need the agent's config, whose module imports JAX.
WITHOUT_ENVIRONMENTS = {
    "--frames 0": "frames must be at least 1",
    "--agent.discount 2": "discount must be in [0, 1]",
    "--topology fused": "Add --env.type jax",
    "--topology fused --env.type jax --replay.batch-size 7": "a multiple or a divisor of env.num",
    "--env.num-envs 0": "num_envs must be at least 1",
    "--evaluator.episodes 15": "a multiple of num_envs",
    "--stop.patience 3": "Add --evaluator.period FRAMES",
    "--replay.sampler-factory m:f": "sampler_factory must be empty with the sampler fifo",
    "--replay.sampler uniform": "Add --replay.samples-per-insert N",
    "--env.num-envs 64": "replay.max_size must be at least 64",
    "--data nowhere": "nowhere must be a dataset",
    "--run-dir held": "must be new or empty; it holds a_file",
    "--run-dir held/a_file": "must be a directory that can be written",
    "--run-dir run": "Continue that run with --resume",
    "--loggers jsonnl": "did you mean 'jsonl'",
    "--loggers no_such_module:x": "there is no module 'no_such_module'",
    "--network-factory no_such_module:x": "network_factory 'no_such_module:x': there is no module",
    "--network-factory builtins:len": "it does not take these arguments",
    "--policy-factory math:pi": "policy_factory math:pi must be a function () -> Policy",
    "--stop.factory math:pii": "did you mean 'pi'?",
    "--learner.devices 7": "the only local device is 0",
    "--seeds": "--seeds must be followed by one or more seeds",
    "--population 1": "--population must be at least 2",
    "--profile 30..20 --dry-run": "such as 20..30",
}


def run(tmp_path, commands, modules):
    """Runs commands in one process; returns (arguments, code, text, imported modules) of each."""
    (tmp_path / "held").mkdir()
    (tmp_path / "held" / "a_file").touch()
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "config.json").write_text("{}")
    arguments = [json.dumps([command.split() for command in commands]), json.dumps(sorted(modules))]
    done = subprocess.run(
        [
            sys.executable,
            "-c",
            f"import sys; sys.path.insert(0, {str(ROOT)!r})\n{MAIN}",
            *arguments,
        ],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=100,
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


@pytest.mark.timeout(110)
@pytest.mark.parametrize(
    ("prefix", "mistakes", "modules"),
    [
        ("", WITHOUT_JAX, JAX | ENVIRONMENTS | RUN),
        pytest.param(
            "train cartpole-ppo ",
            WITHOUT_ENVIRONMENTS,
            ENVIRONMENTS | RUN,
            marks=[pytest.mark.slow, pytest.mark.chosen],
        ),
    ],
)
def test_a_mistake_is_found_before_imports(tmp_path, prefix, mistakes, modules):
    found = run(tmp_path, [prefix + words for words in mistakes], modules)
    assert len(found) == len(mistakes)
    for (args, code, told, imported), hint in zip(found, mistakes.values(), strict=True):
        assert hint in told, (args, told)
        assert code in (1, 2), args
        assert imported == [], args
        assert "Traceback" not in told
