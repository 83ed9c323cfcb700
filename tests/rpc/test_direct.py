"""What is special to calls within a process: nothing is copied, and arrays are read-only."""

import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from rlstack.rpc import RemoteObject, codec, remote, serve
from rlstack.types import TimeStep
from tests.rpc.test_codec import Output, same

pytestmark = [pytest.mark.timeout(30)]


class Keeper:
    """Keeps what it is given."""

    def __init__(self):
        self.kept, self.own = None, np.zeros(3)

    @remote()
    def keep(self, value):
        self.kept = value
        return self.own


def test_arrays_are_the_same_memory_and_read_only():
    node = Keeper()
    with serve(node, transport="direct") as server:
        client = RemoteObject(server.address, Keeper, name="n")
        rows = np.ones(5)
        counts = {"steps": 1, "more": [rows]}
        answer = client.keep(counts)
    assert np.shares_memory(node.kept["more"][0], rows)
    assert np.shares_memory(answer, node.own)
    for array in (node.kept["more"][0], answer):
        with pytest.raises(ValueError, match="read-only"):
            array[0] = 7
    counts["steps"] = 2  # containers are not shared
    counts["more"].append(3)
    assert node.kept["steps"] == 1 and len(node.kept["more"]) == 1
    rows[0] = 7  # the sender may write
    assert rows.flags.writeable


def test_shared_trees_equal_those_from_messages():
    values = [
        {"a": np.arange(3), "b": (np.float32(2), None, True, -1, 2**62, 1.5, "é", b"\x00")},
        [jnp.ones(3, jnp.bfloat16), np.ones(2, ml_dtypes.float8_e4m3fn), np.zeros((0, 3))],
        np.arange(6)[::2],
        np.arange(3, dtype=">i4"),
        bytearray(b"x"),
        TimeStep(np.ones(2, np.int32), np.zeros(2), np.ones(2), {"image": np.ones((2, 3))}),
        {},
        (),
    ]
    for value in values:
        expected = codec.decode(codec.encode(value))
        assert same(codec.share(value), expected), value
    assert isinstance(codec.share(Output(1, 2)), Output)


@pytest.mark.parametrize(
    ("bad", "says"),
    [
        ({"x": [object()]}, r"codec.encode: at /x/0: objects of builtins.object cannot be sent"),
        ([2**63], r"codec.encode: at /0: an int must fit in 64 bits"),
        ({1: 2}, r"keys must be str"),
        (np.array(["text"]), r"arrays of dtype <U4 cannot be sent"),
        (np.array([object()]), r"arrays of dtype object cannot be sent"),
    ],
)
def test_what_cannot_be_sent_cannot_be_shared(bad, says):
    for function in (codec.share, codec.encode):
        with pytest.raises(ValueError, match=says):
            function(bad)


def test_trees_that_are_too_deep_are_refused():
    deep = 0
    for _ in range(70):
        deep = [deep]
    with pytest.raises(ValueError, match="nested at most 64 deep"):
        codec.share(deep)


def test_a_number_belongs_to_one_server():
    taken = pytest.raises(OSError, match="has the number 7 already")
    with serve(Keeper(), port=7, transport="direct"), taken:
        serve(Keeper(), port=7, transport="direct")
    with serve(Keeper(), port=7, transport="direct") as again:
        assert again.address == "direct://localhost:7"
