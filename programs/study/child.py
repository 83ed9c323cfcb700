"""The main function of a process that trains a run of a set, or a set; `executors` starts it."""

from __future__ import annotations

import json
import signal
import sys

from rlstack.programs.program import supervisor
from rlstack.programs.session import module_path, signals
from rlstack.programs.session.display import lasting
from rlstack.programs.session.signals import Interrupted


def main() -> int:
    """Trains runs: its arguments are a set, a run ("" for the whole set) and budgets as JSON."""
    root, name, budgets = sys.argv[1:4]
    supervisor.die_with_parent(signal.SIGTERM, supervisor.parent_id())
    signals.watch("train")
    module_path.arrange()
    from rlstack.programs.study import study  # after `watch`, because it takes seconds

    try:
        if name:
            study.train_one(root, name, json.loads(budgets))
        else:
            study.resume(root, json.loads(budgets), reports=False)
    except Interrupted as end:
        print(end, file=lasting())
        return end.exit_code
    return 0
