"""Makes the functions of the user's own that an experiment names, and checks them beforehand."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any

from rlstack.envs.watch import Limit, Watch
from rlstack.programs.build.agent import check_factories
from rlstack.programs.build.evaluation import check_evaluator
from rlstack.programs.config.experiment import Experiment
from rlstack.programs.session.own_loggers import check_loggers
from rlstack.programs.session.stopping import make_rules
from rlstack.references import name_of

if TYPE_CHECKING:  # each module is imported by experiments that name such a hook
    from rlstack.acting.step_processor import Processor, Step


def check_hooks(experiment: Experiment) -> None:
    """Makes each hook of the experiment once, as its node will, and checks its signature.

    Raises:
      ValueError: a hook cannot be imported.
      rlstack.checks.WrongKindError: a hook is not the function that its option describes.
    """
    check_loggers(experiment.loggers)
    check_factories(experiment)
    make_rules(experiment.stop)
    if experiment.evaluator.factory:
        check_evaluator(experiment.evaluator.factory)
    if experiment.replay.sampler_factory:
        from rlstack.replay.custom import make_sampler

        make_sampler(experiment.replay)
    if experiment.replay.item_processor:
        from rlstack.replay.episodes import make_processor

        make_processor(experiment.replay)
    if experiment.observation_processor:
        from rlstack.families.observing import load_processor

        load_processor(experiment.observation_processor)
    if experiment.levels.rule:
        from rlstack.families.levels import load_rule

        load_rule(experiment.levels)
    make_step_processor(experiment)


def make_step_processor(experiment: Experiment) -> Processor | None:
    """Makes the step processor of one actor; None if the experiment has none.

    Raises:
      ValueError: the step processor's factory cannot be imported.
      rlstack.checks.WrongKindError: the object is not a step processor.
    """
    if not experiment.step_processor:
        return None
    from rlstack.acting.step_processor import make_processor

    processor = make_processor(experiment.step_processor, experiment.env.num_envs)
    watch = Watch(f"the step processor {name_of(experiment.step_processor)}", kind="")
    limit = Limit(experiment.env.step_timeout, "env.step_timeout")

    def watched(step: Step) -> Any:
        with watch.calls("a call", limit):
            return processor(step)

    kind = processor if hasattr(processor, "__qualname__") else type(processor)
    return functools.update_wrapper(watched, kind, ("__module__", "__qualname__"), ())
