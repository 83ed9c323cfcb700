"""Games end when the process that plays against them is killed."""

import signal
import subprocess
import sys

import psutil
import pytest

from rlstack.entity.inverted import guard

pytestmark = pytest.mark.timeout(60)

# A game that neither reads from its socket nor ends, with a process of its own.
STUBBORN = (
    "import subprocess, sys, time\n"
    "from tests.entity.inverted.games import *\n"
    "from rlstack.entity.inverted.client import Connection\n"
    "connection = Connection(OBS, ACTIONS, 1)\n"
    "subprocess.Popen([sys.executable, '-S', '-c', 'import time; time.sleep(600)'])\n"
    "time.sleep(600)\n"
)
TRAINER = """
import shlex, sys
from rlstack.entity.inverted import SocketGame
game = SocketGame(command=shlex.join([sys.executable, "-c", sys.argv[1]]))
print("ready", flush=True)
sys.stdin.read()
"""


@pytest.mark.slow
@pytest.mark.chosen
def test_a_game_ends_when_its_trainer_is_killed():
    trainer = subprocess.Popen(
        [sys.executable, "-c", TRAINER, STUBBORN], stdout=subprocess.PIPE, stdin=subprocess.PIPE
    )
    below = []
    try:
        assert trainer.stdout.readline() == b"ready\n"
        below = psutil.Process(trainer.pid).children(recursive=True)
        assert len(below) >= 2
        trainer.kill()
        assert psutil.wait_procs(below, timeout=10.0)[1] == []
    finally:
        trainer.kill()
        trainer.communicate()
        for process in below:
            if process.is_running():
                process.kill()


def guarded(*command):
    arguments = [sys.executable, "-I", "-S", guard.__file__, *command]
    return subprocess.Popen(arguments, stdin=subprocess.PIPE, start_new_session=True)


@pytest.mark.slow
@pytest.mark.chosen
def test_a_game_ends_when_its_guard_is_killed():
    process = guarded("sleep", "600")
    try:
        while not (children := psutil.Process(process.pid).children()):
            pass
        process.kill()
        assert psutil.wait_procs(children, timeout=10.0)[1] == []
    finally:
        process.kill()
        process.communicate()


@pytest.mark.parametrize(
    ("script", "code"), [("exit 7", 7), ("kill -9 $$", 128 + signal.SIGKILL), ("cat", 0)]
)
def test_the_guard_ends_as_its_game(script, code):
    process = guarded("sh", "-c", script)
    assert process.wait(20.0) == code
    process.communicate()
