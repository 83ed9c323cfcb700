"""Directories of finished runs that were never trained."""

import dataclasses
import json

from rlstack.programs.config.encoding import to_json
from rlstack.programs.config.presets import preset
from rlstack.programs.session.result import Result
from rlstack.programs.session.run_dir import RunDir


def make_run(
    path, score, *, name="cartpole-ppo", env="CartPole-v1", seed=1, curve=None, frames=1000
):
    """Writes what a finished run leaves; its returns rise to the score unless a curve is given."""
    base = preset(name)
    config = dataclasses.replace(
        base, seed=seed, env=dataclasses.replace(base.env, name=env, options={})
    )
    path.mkdir(parents=True)
    directory = RunDir.create(path, name, seed)
    directory.write_config(to_json(config))
    result = Result(
        score, 0.0, 10, frames, 10, 1.0, 1000.0, seed, "single_process", name, "abcdef0"
    )
    directory.write_result(result._asdict())
    curve = curve or [(100 * step, score * step / 10) for step in range(1, 11)]
    lines = [{"env_frames": x, "evaluator/episode_return": y} for x, y in curve]
    directory.metrics.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


def make_runs(root, scores, **options):
    """Writes a run for each score, with seeds from 1."""
    return [
        make_run(root / f"seed={seed}", score, seed=seed, **options)
        for seed, score in enumerate(scores, 1)
    ]
