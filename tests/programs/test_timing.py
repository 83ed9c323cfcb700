"""All waiting times of programs are in one module, which asserts their order."""

import re
from pathlib import Path

import pytest

from rlstack.programs.session import timing

PROGRAMS = Path(timing.__file__).parents[1]
LITERAL = re.compile(
    r"(?:sleep|wait|join)\(\d|timeout=\d|^_?[A-Z_]+(?:SECONDS|PATIENCE|GRACE) =", re.M
)
# The supervisor imports nothing of the stack; its times are arguments.
ALONE = "supervisor.py"


def test_nodes_and_launchers_have_no_waits_of_their_own():
    files = list(PROGRAMS.glob("program/**/*.py"))
    assert len(files) > 15
    found = {p.name: m for p in files if (m := LITERAL.findall(p.read_text())) and p.name != ALONE}
    assert found == {}


@pytest.mark.parametrize(
    ("name", "value"), [("GRACE", 9.0), ("REPLAY_LINGER", 7.0), ("REPORT_PERIOD", 1.0)]
)
def test_a_wait_that_breaks_the_order_is_refused(name, value):
    text = Path(timing.__file__).read_text()
    broken, count = re.subn(rf"^{name} = .*$", f"{name} = {value}", text, flags=re.M)
    assert count == 1
    exec(text, {"__name__": "whole"})
    with pytest.raises(AssertionError):
        exec(broken, {"__name__": "broken"})
