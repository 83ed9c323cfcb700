"""A disk that is full ends a program with the node and the reason."""

import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]

# Namespaces of its own: for the mount, and for a network in which the nodes may listen everywhere,
# since there the kernel lets nobody restrict a socket.
APART = ("unshare", "--map-root-user", "--mount", "--net")
MOUNT = 'ip link set lo up && mount -t tmpfs -o size=640k tmpfs "$1" && shift && exec "$@"'


@pytest.mark.parametrize("topology", ["heavy_env", "distributed"])
def test_a_full_disk_ends_a_program_with_the_node_and_the_reason(tmp_path, topology):
    """The run directory is on a file system of its own, which checkpoints and logs soon fill."""
    if subprocess.run([*APART, "ip", "link", "set", "lo", "up"], capture_output=True).returncode:
        pytest.skip("needs user namespaces and ip")
    command = (
        sys.executable, "-m", "rlstack", "train", "cartpole-ppo", "--topology", topology,
        "--run-dir", tmp_path / "run", "--frames", 100_000_000, "--log-period", 200,
        "--checkpoint-period", 1000, "--program.num-actors", 1,
        "--program.interface", "0.0.0.0",
    )  # fmt: skip
    done = subprocess.run(
        [*APART, "sh", "-c", MOUNT, "sh", str(tmp_path), *map(str, command)],
        capture_output=True,
        text=True,
        timeout=240,
        cwd=Path(__file__).parents[3],
    )
    assert done.returncode == 1, done.stderr
    first = done.stderr[done.stderr.index("rlstack train: ") :].splitlines()[0]
    assert "node coordinator failed: " in first or "node learner failed: " in first, done.stderr
    full = ("No space left on device", "RESOURCE_EXHAUSTED")  # the second is Orbax's
    assert any(text in done.stderr for text in full), done.stderr
    assert "Traceback" not in done.stderr, done.stderr
