"""A program that may open too few files ends with the node, the limit and the way out."""

import re

import pytest

from rlstack.programs.session import errors
from tests.programs.launched import FAST, Launched
from tests.programs.running import nothing_left


def test_other_errors_get_no_advice():
    assert errors.advice("ValueError: no") == ""
    assert errors.noted("ValueError: no") == "ValueError: no"
    assert "RLIMIT_NOFILE" in errors.advice("OSError: [Errno 24] Too many open files: 'x'")


@pytest.mark.slow
@pytest.mark.timeout(300, method="thread")
@pytest.mark.parametrize("topology", ["heavy_env", "distributed"])
@pytest.mark.parametrize("limit", [16, 24])
def test_the_limit_of_open_files_is_named_with_the_node(tmp_path, topology, limit):
    run_dir = tmp_path / "run"
    args = ("cartpole-ppo", "--topology", topology, "--frames", 100_000_000, *FAST)
    shell = ("sh", "-c", f'ulimit -n {limit} && exec "$@"', "sh")
    with (
        nothing_left(),
        Launched(run_dir, *args, "--run-dir", run_dir, within=shell) as program,
    ):
        assert program.end(240) == (1, []), program.stderr
        assert f"A process may have {limit} open files here (RLIMIT_NOFILE)" in program.stderr
        assert re.search(r"node \S+ failed: |rlstack train: .*Too many open", program.stderr)
