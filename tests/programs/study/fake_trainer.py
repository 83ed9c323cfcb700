"""Stands in for a process that trains a trial: it writes what a run writes, without JAX.

The greedy return is highest at a learning rate of 1e-3. What else a trial does depends on the file
`behaviour.json` beside the folder of trials: a mapping from a trial's number to

    fail        end with an error
    nan         have the return NaN
    wait        evaluate once, and go on until it is asked to end; when started again, finish
"""

import ctypes
import json
import math
import signal
import sys
import time
from pathlib import Path

# The arguments are those of rlstack.programs.study.processes; the interpreter is that of the tests.
MAIN = f"import sys; sys.path.insert(0, {str(Path(__file__).parent)!r}); import fake_trainer; "
MAIN += "fake_trainer.main()"


def main():
    ctypes.CDLL(None).prctl(1, signal.SIGTERM)  # end with the parent
    root = Path(sys.argv[1])
    content = json.loads((root / "study.json").read_text())
    ((name, (value,)),) = content["values"].items()
    text = f"{value:g}" if float(f"{value:g}") == value else str(value)
    folder = root.parent.parent
    behaviour = json.loads((folder / "behaviour.json").read_text()).get(root.name, "")
    for seed in content["seeds"]:
        path = root / f"{name.rpartition('.')[2]}={text},seed={seed}"
        train(path, seed, 100.0 - 10.0 * abs(math.log10(value) + 3), behaviour)


def train(path, seed, score, behaviour):
    again = path.exists()
    path.mkdir(exist_ok=True)
    if behaviour == "fail":
        sys.exit("ValueError: this trial | fails")
    with (path / "metrics.jsonl").open("a") as file:
        for step in (1, 2, 3):
            print(json.dumps({"env_frames": step, "actor/episode_return": 1.0}), file=file)
            line = {"env_frames": step, "evaluator/episode_return": score * step / 3}
            print(json.dumps(line), file=file, flush=True)
            if behaviour == "wait" and not again:
                signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
                time.sleep(60)
                sys.exit("nobody asked it to end")
    result = {
        "eval_return_mean": math.nan if behaviour == "nan" else score + seed - 1,
        "eval_return_std": 0.0,
        "eval_episodes": 2,
        "env_frames": 3,
        "learner_steps": 1,
        "wall_seconds": 0.1,
        "frames_per_second": 30.0,
        "seed": seed,
        "topology": "single_process",
        "preset": "cartpole-ppo",
        "git_commit": "none",
    }
    (path / "result.json").write_text(json.dumps(result))
