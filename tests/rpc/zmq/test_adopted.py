"""A process of a host that does not see the file of keys takes them from the launcher."""

import subprocess
import sys

import pytest

from rlstack.rpc import transports

_ELSEWHERE = """
import sys
from rlstack.rpc import transports
from rlstack.rpc.zmq import keys
transports.adopt(sys.stdin.buffer.read())
print(keys.current().text().hex())
"""


@pytest.mark.timeout(60)
def test_keys_that_were_sent_are_those_of_the_program():
    with transports.chosen("zmq"):
        sent = transports.secret()
    done = subprocess.run(
        [sys.executable, "-c", _ELSEWHERE], input=sent, capture_output=True, timeout=40
    )
    assert (done.stdout.decode().strip(), len(sent.split())) == (sent.hex(), 4), done.stderr


def test_other_transports_have_no_secret():
    with transports.chosen("direct"):
        assert transports.secret() == b""
    transports.adopt(b"")  # does nothing
