"""Programs that do not follow the protocol, and the bytes that they send."""

import struct
import sys

SCRIPT = """\
#!{python} -IS
import os, socket
address, said = os.environ["RLSTACK_GAME_ADDRESS"], {said!r}
with socket.socket(socket.AF_UNIX) as trainer:
    trainer.connect(address.removeprefix("unix:"))
    token = os.environ["RLSTACK_GAME_TOKEN"].encode()
    for data in said:
        data = data.replace(b"TOKEN", len(token).to_bytes(4, "little") + token)
        if data[:4] == bytes(4):
            data = (len(data) - 4).to_bytes(4, "little") + data[4:]
        trainer.sendall(data)
        trainer.recv(1 << 16)
"""


def program(tmp_path, *said):
    """A program that sends some bytes, one part after each message that it receives."""
    path = tmp_path / "program"
    path.write_text(SCRIPT.format(python=sys.executable, said=said))
    path.chmod(0o755)
    return f"rust:{path}"


def frame(kind, body=b""):
    """A frame whose length the program fills in, because it contains the token."""
    return bytes(4) + bytes([kind]) + body


def text(value):
    return struct.pack("<I", len(value)) + value.encode()


def hello(version=1, refusal="", spaces=None):
    """A MANY_HELLO of one entity type without features and an action of two choices."""
    if spaces is None:
        spaces = struct.pack("<I", 1) + text("A") + struct.pack("<IIII", 1, 0, 0, 1) + text("go")
        spaces += struct.pack("<BII", 0, 1, 2) + text("l") + text("r")
    head = b"RLGP" + struct.pack("<I", version) + b"TOKEN"
    return frame(8, head + text("fake") + text(refusal) + spaces)


def row(kind=0, count=1, actor=0, reward=0.0, discount=1.0, flags=(1, 1, 1), rest=b""):
    """ROWS of one environment of the spaces of `hello`."""
    values = struct.pack("<IIiiiff3B", 1, 0, kind, count, actor, reward, discount, *flags)
    return frame(11, values + rest)
