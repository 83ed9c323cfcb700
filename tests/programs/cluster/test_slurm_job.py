"""A job of Slurm trains on two nodes, with stand-ins for sbatch and srun that start its processes.

The nodes are two loopback addresses of this machine.
"""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from rlstack.storage import checkpoint
from tests.programs.cluster.files import directives, made
from tests.programs.launched import FAST

pytestmark = [pytest.mark.slow, pytest.mark.timeout(200)]
ROOT = Path(__file__).resolve().parents[3]
NODES = ("127.0.0.11", "127.0.0.12")
# Reads the job's parts as Slurm does, and replaces itself by the script. Its signal goes to the
# script alone, as that of --signal=B:TERM@120 does.
SBATCH = """\
parts=$(grep -c '^#SBATCH --nodes=1$' "$1")
[ "$parts" = 2 ] || { echo "sbatch: $parts parts of one node each" >&2; exit 1; }
export SLURM_JOB_ID=7 SLURM_HET_SIZE=2 SLURM_JOB_NODELIST=127.0.0.11
export SLURM_JOB_NODELIST_HET_GROUP_0=127.0.0.[11] SLURM_JOB_NODELIST_HET_GROUP_1=127.0.0.[12]
exec bash "$1"
"""
# Starts a task on each node, passes signals on, and ends all tasks if one fails.
SRUN = """\
while [[ $1 == --* ]]; do echo "$1" >> "$NOTES"; shift; done
for node in 127.0.0.11 127.0.0.12; do
  SLURMD_NODENAME=$node "$@" > "$NOTES.$node" 2>&1 & tasks+=($!)
done
trap 'kill -TERM "${tasks[@]}" 2>/dev/null' TERM
code=0
for task in "${tasks[@]}"; do
  wait "$task"; one=$?
  while kill -0 "$task" 2>/dev/null; do wait "$task"; one=$?; done
  if [ "$one" != 0 ]; then code=$one; kill -TERM "${tasks[@]}" 2>/dev/null; fi
done
exit "$code"
"""
RLSTACK = f'exec {sys.executable} -m rlstack "$@"\n'


class Job:
    """A job that `sbatch` has started."""

    def __init__(self, folder, text):
        self.folder, self._seen = folder, {}
        for name, body in (("sbatch", SBATCH), ("srun", SRUN), ("rlstack", RLSTACK)):
            (folder / name).write_text(f"#!/bin/bash\n{body}")
            (folder / name).chmod(0o755)
        script = folder / "job.sbatch"
        script.write_text(text)
        variables = {"PATH": f"{folder}:{os.environ['PATH']}", "NOTES": str(folder / "notes")}
        variables |= {"PYTHONPATH": str(ROOT), "TMPDIR": str(folder / "temporary")}
        (folder / "temporary").mkdir(exist_ok=True)
        self.process = subprocess.Popen(
            ["sbatch", script], env={**os.environ, **variables}, start_new_session=True
        )

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.look()
        for process in [*self._seen.values(), self.process]:
            if process is self.process or process.is_running():
                process.kill()
        self.process.wait()

    def look(self):
        if self.process.poll() is None:
            below = psutil.Process(self.process.pid).children(recursive=True)
            self._seen.update({p.pid: p for p in below})

    def output(self):
        return "\n".join(path.read_text() for path in sorted(self.folder.glob("notes.*")))

    def wait_for(self, condition, timeout=90.0):
        until = time.monotonic() + timeout
        while not condition():
            assert self.process.poll() is None, self.output()
            assert time.monotonic() < until, self.output()
            self.look()
            time.sleep(0.1)

    def end(self, timeout):
        """The exit code, and the processes that are left."""
        until = time.monotonic() + timeout
        while self.process.poll() is None and time.monotonic() < until:
            self.look()
            time.sleep(0.1)
        code = self.process.wait(1)
        _, alive = psutil.wait_procs(list(self._seen.values()), timeout=10.0)
        return code, [p.cmdline() for p in alive if p.is_running()]


def job(capsys, folder, *words):
    run_dir = folder / "run"
    text = made(capsys, "slurm", "--run-dir", run_dir, "--program.num-actors", 2, *FAST, *words)
    assert [part["nodes"] for part in directives(text)] == ["1", "1"]
    return Job(folder, text), run_dir


def listed(run_dir):
    return sorted(f"{path.parent.name}/{path.name}" for path in (run_dir / "logs").glob("*/*"))


@pytest.mark.chosen
def test_it_trains_on_both_nodes_and_a_job_that_is_started_again_continues(tmp_path, capsys):
    started, run_dir = job(capsys, tmp_path, "--frames", 100_000_000)
    with started:
        metrics = run_dir / "metrics.jsonl"
        started.wait_for(lambda: metrics.exists() and "learner/loss" in metrics.read_text())
        assert len(listed(run_dir)) == 7
        titles = {" ".join(p.cmdline()).strip() for p in started._seen.values() if p.is_running()}
        assert any(title.startswith("rlstack: actor/1 ") for title in titles)
        started.process.send_signal(signal.SIGTERM)  # as two minutes before the time limit
        code, left = started.end(60)
        assert (code, left) == (143, []), started.output()
    notes = (tmp_path / "notes").read_text().splitlines()
    assert notes[:3] == ["--kill-on-bad-exit=1", "--cpu-bind=none", "--het-group=0,1"]
    saved = checkpoint.latest(run_dir / "checkpoints")
    frames = checkpoint.read_metadata(saved)["env_frames"]
    assert frames > 0 and not (run_dir / "result.json").exists()
    config = json.loads((run_dir / "config.json").read_text())
    config["frames"] = frames + 2000  # so that the second job ends
    (run_dir / "config.json").write_text(json.dumps(config))
    again, _ = job(capsys, tmp_path, "--frames", 100_000_000)
    with again:
        code, left = again.end(120)
        assert (code, left) == (0, []), again.output()
    result = json.loads((run_dir / "result.json").read_text())
    assert result["env_frames"] >= frames + 2000
    assert not list(run_dir.glob(".program*")) and not list(run_dir.rglob("*keys*"))
