"""Videos of the policy during training, as ``rlstack watch --video`` makes them afterwards.

The packages that draw videos are imported only in a run that makes them.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from rlstack.checks import no_exits
from rlstack.programs.build.seeds import role_seed
from rlstack.programs.config.experiment import Experiment
from rlstack.programs.pictures.video import missing_packages
from rlstack.programs.session.run_dir import RunDir
from rlstack.types import EnvSpec, Params

if TYPE_CHECKING:
    from rlstack.programs.build.policies.policy import Policy
    from rlstack.programs.pictures.stage import Stage

_FIELD = "Experiment: evaluator.video"


def check_videos(experiment: Experiment) -> None:
    """Checks that the videos of a run can be made; an experiment without videos passes.

    One environment is made, drawn once and closed, unless it is written in JAX.

    Raises:
      ValueError: a package is missing, the environment cannot be drawn, or there are several
        policies.
    """
    if not experiment.evaluator.video:
        return
    if experiment.policies:
        raise ValueError(
            f"{_FIELD} must be 0 with policies, because a video shows one policy; got "
            f"{experiment.evaluator.video}."
        )
    if missing := missing_packages(_suffix()):
        raise ValueError(
            f"{_FIELD} needs {' and '.join(missing)}, which the extra `video` of rlstack brings; "
            "`rlstack doctor` prints the command."
        )
    if experiment.env.type == "jax":
        return  # shown by its observations; drawing one would start JAX before it is configured
    try:
        with no_exits(), contextlib.closing(_stage(experiment)) as stage:
            stage.picture(stage.pool.reset())
    except Exception as error:
        raise ValueError(
            f"{_FIELD} needs an environment that can be drawn; {experiment.env.name} raised "
            f"{type(error).__name__}: {error}. Train with --evaluator.video 0."
        ) from error


class TrainingVideos:
    """Makes a video of one greedy episode at every N-th evaluation.

    The environment has the same seed in all videos of a run, so that they show the same episode.
    Training does not see it.
    """

    def __init__(
        self, experiment: Experiment, directory: RunDir, tell: Callable[[str], None]
    ) -> None:
        """Creates no environment and no policy until the first video is due.

        Args:
          experiment: the run's experiment, which sets the evaluations that are recorded.
          directory: the run's directory.
          tell: shows the user a line; called once for each video that could not be made.
        """
        self._experiment, self._directory, self._tell = experiment, directory, tell
        self._evaluations = 0
        self._policy: Policy | None = None

    def evaluated(self, frames: int, params: Params) -> Path | None:
        """Makes a video if one is due.

        Args:
          frames: environment steps that the params have learned from.
          params: the params that were evaluated.

        Returns:
          The file; None if no video is due, or if it could not be made.

        Raises:
          rlstack.programs.session.run_lock.ClaimLostError: another command has taken the directory
            over.
        """
        self._evaluations += 1
        every = self._experiment.evaluator.video
        if not every or self._evaluations % every:
            return None
        self._directory.check_claim()
        path = self._directory.videos / f"{frames}{_suffix()}"
        try:
            with no_exits():
                self._make(path, frames, params)
        except Exception as error:
            self._tell(
                f"no video at frame {frames:,}: {type(error).__name__}: {error}; training goes on."
            )
            return None
        return path

    def _make(self, path: Path, frames: int, params: Params) -> None:
        from rlstack.programs.pictures.watch import film

        path.parent.mkdir(exist_ok=True)
        with contextlib.closing(_stage(self._experiment)) as stage:
            policy = self._policy_with(params, frames, stage.spec)
            film(stage, policy, path, f"frame {frames:,}")

    def _policy_with(self, params: Params, frames: int, spec: EnvSpec) -> Policy:
        """Returns the policy, reset for a new episode; the first video compiles it."""
        from rlstack.programs.build.policies.policy import Policy

        if self._policy is None:
            self._policy = Policy(self._experiment, spec, params, seed=self._experiment.seed)
        self._policy.params, self._policy.env_frames = params, frames
        self._policy.reset()
        return self._policy


def _stage(experiment: Experiment) -> Stage:
    from rlstack.programs.pictures.stage import Stage

    return Stage(experiment, role_seed(experiment.seed, "watch"))


def _suffix() -> str:
    return ".gif" if missing_packages(".mp4") == ["PyAV"] else ".mp4"
