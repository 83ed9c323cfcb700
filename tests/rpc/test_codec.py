"""Trees of arrays as bytes: exact round trips, and damaged bytes are safe."""

import collections
import contextlib
import dataclasses
import enum
import struct
import tracemalloc
from typing import Any, NamedTuple

import hypothesis
import hypothesis.extra.numpy as hnp
import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from rlstack.acting.inference import Inference
from rlstack.rpc import codec
from rlstack.rpc.header import CODES, DTYPES, MAGIC, MAX_DEPTH, MAX_HEADER, schema_of
from rlstack.types import Batch, StepType, TimeStep, Transition

ALL_DTYPES = [dtype for dtype in DTYPES if dtype is not None]


class Output(NamedTuple):
    action: Any
    value: Any


def same(a, b):
    """Whether two trees are equal in type, structure, dtype, shape and bits."""
    if isinstance(a, np.ndarray | np.generic):
        return (
            type(a) is type(b)
            and (a.dtype, a.shape) == (b.dtype, b.shape)
            and a.tobytes() == b.tobytes()
        )
    if isinstance(a, float):
        return type(b) is float and struct.pack("<d", a) == struct.pack("<d", b)
    if isinstance(a, dict):
        return type(b) is dict and list(a) == list(b) and all(same(a[k], b[k]) for k in a)
    if isinstance(a, tuple | list):
        return type(a) is type(b) and len(a) == len(b) and all(map(same, a, b))
    return type(a) is type(b) and a == b


def there_and_back(tree, **options):
    return codec.decode(codec.encode(tree), **options)


def timestep(batch=4):
    return TimeStep(
        np.full(batch, StepType.MID, np.int32),
        np.zeros(batch, np.float32),
        np.ones(batch, np.float32),
        {"pixels": np.arange(batch * 12, dtype=np.uint8).reshape(batch, 2, 6), "none": None},
    )


def test_every_dtype_of_jax_has_a_code():
    names = "bool_ int8 int16 int32 int64 uint8 uint16 uint32 uint64 float16 float32 float64"
    names += " bfloat16 complex64 complex128 float8_e4m3fn float8_e5m2 int4 uint4"
    assert all(np.dtype(getattr(jnp, name)) in CODES for name in names.split())
    assert [DTYPES[code].name for code in (0, 5, 10, 14, 16)] == [
        "bool", "uint8", "float32", "bfloat16", "int4",
    ]  # fmt: skip


@pytest.mark.parametrize("dtype", ALL_DTYPES, ids=lambda dtype: dtype.name)
def test_arrays_of_every_dtype_and_layout(dtype):
    wide = np.arange(24).reshape(2, 3, 4).astype(dtype)
    trees = [wide, wide[1, 2, 3:].reshape(()), wide[:0], wide[:, :0], wide[:, ::2], wide.T]
    trees += [np.asfortranarray(wide), wide[::-1], np.broadcast_to(wide[0, 0], (5, 4)), wide[0, 0]]
    back = there_and_back(trees)
    assert same([np.ascontiguousarray(x).reshape(x.shape) for x in trees], back)
    assert not any(array.flags.writeable for array in back)
    scalar = wide[1, 2, 3]
    assert same(there_and_back({"x": scalar}), {"x": scalar})
    swapped = wide.astype(dtype.newbyteorder(">"))
    assert same(there_and_back(swapped), wide)


def test_jax_arrays_and_prng_keys():
    keys = jax.random.split(jax.random.PRNGKey(3), 4)
    tree = {"key": keys, "half": jnp.ones((2, 2), jnp.bfloat16), "zero": jnp.float32(2)}
    assert same(there_and_back(tree), {name: np.asarray(x) for name, x in tree.items()})
    with pytest.raises(ValueError, match=r"at /0: .*key_data"):
        codec.encode([jax.random.key(0)])


def test_python_values_containers_and_order():
    tree = {
        "z": [None, True, False, 0, -(2**63), 2**63 - 1, 1.5, -0.0, float("nan"), float("inf")],
        "a": ("", "naïve\0\n", b"", bytes(range(256)), (), [], {}, {"": ((),)}),
        "m": collections.OrderedDict([("b", 1), ("a", 2)]),
    }
    back = there_and_back(tree)
    assert same(back, {**tree, "m": {"b": 1, "a": 2}})
    assert list(back) == ["z", "a", "m"]
    assert same(there_and_back(StepType.LAST), 2)
    assert same(there_and_back(bytearray(b"ab")), b"ab")
    for root in (None, 3, "x", np.float32(2), np.zeros(3)):
        assert same(there_and_back(root), root)


def test_arrays_are_views_at_aligned_offsets():
    tree = [np.arange(3), "text", np.ones((3, 5), np.uint8), np.arange(4.0)]
    data = codec.encode(tree)
    start = np.frombuffer(data, np.uint8).ctypes.data
    for array in codec.decode(data)[::2]:
        assert (array.ctypes.data - start) % 64 == 0
        assert start < array.ctypes.data < start + len(data)
    for other in (bytearray(data), memoryview(data)):
        back = codec.decode(other)
        assert same(back[0], tree[0])
        assert not back[0].flags.writeable


def test_named_tuples_of_the_stack_arrive_as_such_others_as_tuples():
    step = timestep()
    output = Output(np.zeros(4, np.int32), np.ones(4, np.float32))
    item = Batch(Transition(step, output, (), np.zeros(4, np.int32)), np.ones(4, np.float32))
    back = there_and_back(item)
    assert type(back) is Batch
    assert type(back.trajectory.timestep) is TimeStep
    assert same(back.trajectory.timestep, step)
    assert same(back.trajectory.agent_output, tuple(output))


def test_registered_and_exemplary_named_tuples(monkeypatch):
    # Programs that other tests ran in threads have registered their classes.
    unknown = {name: cls for name, cls in codec._CLASSES.items() if cls is not Inference}
    monkeypatch.setattr(codec, "_CLASSES", unknown)
    answer = Inference(Output(np.zeros(4), np.ones(4)), (), np.zeros(4, np.int32))
    shapes = jax.eval_shape(lambda: jax.tree.map(lambda x: jnp.zeros((9,)), answer))
    like = jax.tree.map(lambda s, a: jax.ShapeDtypeStruct(s.shape, a.dtype), shapes, answer)
    assert same(there_and_back(answer, like=like), answer)
    assert type(there_and_back(answer)) is tuple
    step = timestep()
    assert same(there_and_back(step, like=tuple(step)), tuple(step))
    codec.register(Inference, Output)
    assert same(there_and_back(answer), answer)
    fake = codec.encode(answer).replace(b"Output", b"Inputs")
    assert same(codec.decode(fake).agent_output, tuple(answer.agent_output))
    with pytest.raises(TypeError, match="classes must be NamedTuples"):
        codec.register(dict)


def test_a_registered_class_of_other_fields_is_refused(monkeypatch):
    data = codec.encode(Output(1, 2))
    longer = collections.namedtuple("Output", "a b c", module=Output.__module__)
    monkeypatch.setattr(codec, "_CLASSES", {f"{Output.__module__}.Output": longer})
    with pytest.raises(ValueError, match="must have 3 fields; got 2"):
        codec.decode(data)


@pytest.mark.parametrize(
    ("tree", "like", "match"),
    [
        ({"a": 1}, {"b": 1}, r"the root: keys must be \['b'\]; got \['a'\]"),
        ((1, 2), (1,), "the root: must have 1 entries; got 2"),
        ([1], (1,), "must be a tuple; got list"),
        (Output(1, [2]), Output(1, (2,)), "the root/value: must be a tuple"),
        ({"x": np.zeros(3)}, {"x": np.zeros(3, np.float32)}, "the root/x: must be float32 of rank"),
        (np.zeros((3, 1)), np.zeros(3), r"rank 1; got float64 of shape \(3, 1\)"),
        (1.0, np.zeros(3), "got float"),
        (1, 1.0, "must be float; got int"),
        (None, (), "must be a tuple; got NoneType"),
    ],
)
def test_what_does_not_fit_the_example_is_refused(tree, like, match):
    with pytest.raises(ValueError, match=match):
        there_and_back(tree, like=like)


@dataclasses.dataclass
class Thing:
    x: int = 0


class Colour(enum.Enum):
    RED = 1


@pytest.mark.parametrize(
    ("tree", "match"),
    [
        ({"a": [0, 2**63]}, r"at /a/1: an int must fit in 64 bits; got 9223372036854775808"),
        ({"a": {3: 1}}, "at /a: keys must be str; got 3"),
        ([Thing()], r"at /0: objects of tests\.rpc\.test_codec\.Thing cannot be sent"),
        (Colour.RED, "at the root: objects of tests.rpc.test_codec.Colour can"),
        ({"s": {1, 2}}, "at /s: objects of builtins.set"),
        (np.array(["a"]), "dtype <U1"),
        ((np.array([None]),), "at /0: arrays of dtype object"),
        (np.zeros(2, "datetime64[s]"), "datetime64"),
        (np.zeros(2, [("a", int)]), "arrays of dtype"),
        (np.longdouble(1), "longdouble|float128"),
        ("\ud800", "surrogates"),
        (2j, "objects of builtins.complex"),
    ],
)
def test_what_cannot_be_sent_is_said_with_its_place(tree, match):
    with pytest.raises(ValueError, match=match):
        codec.encode(tree)


def test_depth_and_number_of_leaves_are_bounded_both_ways():
    def nested(depth):
        return [nested(depth - 1)] if depth else None

    assert there_and_back(nested(MAX_DEPTH)) == nested(MAX_DEPTH)
    with pytest.raises(ValueError, match="nested at most"):
        codec.encode(nested(MAX_DEPTH + 1))
    cycle: list = []
    cycle.append(cycle)
    with pytest.raises(ValueError, match="nested at most"):
        codec.encode(cycle)
    with pytest.raises(ValueError, match="at most 1048576 bytes"):
        codec.encode([None] * MAX_HEADER)


def message(header, rest=b""):
    return struct.pack("<4sI", MAGIC, len(header)) + header + rest


def u32(n):
    return struct.pack("<I", n)


def u64(n):
    return struct.pack("<Q", n)


@pytest.mark.parametrize(
    ("data", "match"),
    [
        (b"", "at least 8 bytes"),
        (b"PK\x03\x04" + bytes(20), "must begin with"),
        (b"RLC\x02" + bytes(20), "must begin with"),
        (message(b"N")[:-1], "a header of 1 bytes in 8"),
        (struct.pack("<4sI", MAGIC, 2**32 - 1) + b"N", "a header of 4294967295 bytes"),
        (message(b""), "ends too early"),
        (message(b"NN"), "continues after its tree"),
        (message(b"?"), "unknown kind of node"),
        (message(b"N", b"x"), "1 bytes after the end"),
        (message(b"I", b"123"), "truncated"),
        (message(b"S", u64(5) + b"abc"), "truncated"),
        (message(b"S", u64(2**64 - 1)), "truncated"),
        (message(b"S", u64(1) + b"\xff"), "utf-8"),
        (message(b"L" + u32(2**32 - 1)), "ends too early"),
        (message(b"D" + u32(2) + (u32(1) + b"k" + b"N") * 2), "a key twice"),
        (message(b"D" + u32(1) + u32(2**31) + b"k"), "ends too early"),
        (message(b"C" + u32(1) + b"x"), "ends too early"),
        (message((b"L" + u32(1)) * 5000 + b"N"), "nested at most 64 deep"),
        (message(b"A\xff\x00"), "unknown dtype code 255"),
        (message(b"A\x00\x21" + u64(1) * 33, b"1"), "rank 33"),
        (message(b"A\x05\x01" + u64(2**63), b"1"), "got shape"),
        (message(b"A\x05\x02" + u64(0) + u64(2**64 - 1)), "got shape"),
        (message(b"A\x05\x01" + u64(2**40), b"1"), "truncated"),
        (message(b"A\x05\x01" + u64(1)), "truncated"),
    ],
)
def test_malformed_bytes_are_refused_without_large_allocations(data, match):
    tracemalloc.start()
    try:
        with pytest.raises(ValueError, match=match):
            codec.decode(data)
        assert tracemalloc.get_traced_memory()[1] < 2**20
    finally:
        tracemalloc.stop()


def test_what_strangers_make_us_remember_is_bounded():
    from rlstack.rpc import header

    for size in range(300):
        codec.decode(codec.encode(np.zeros((size, 0))))
    for size in (2**14 - 6, 2**14, 2**15):
        codec.encode([None] * size)
    assert len(header._SCHEMAS) <= 256
    assert max(map(len, header._SCHEMAS)) <= 1 << 14
    assert schema_of(b"N") is schema_of(b"N")


LEAVES = (
    st.none()
    | st.booleans()
    | st.integers(-(2**63), 2**63 - 1)
    | st.floats()
    | st.text(max_size=9)
    | st.binary(max_size=9)
    | hnp.arrays(
        st.sampled_from([np.dtype(c) for c in "?bBhHiIqQefdFD"]),
        hnp.array_shapes(min_dims=0, max_dims=3, min_side=0, max_side=4),
    )
)
TREES = st.recursive(
    LEAVES,
    lambda t: (
        st.lists(t, max_size=4)
        | st.lists(t, max_size=4).map(tuple)
        | st.dictionaries(st.text(max_size=4), t, max_size=4)
        | st.tuples(t, t).map(lambda pair: Output(*pair))
    ),
    max_leaves=12,
)
quick = hypothesis.settings(max_examples=150, deadline=None)


@quick
@hypothesis.given(TREES)
def test_any_tree_comes_back(tree):
    assert same(codec.conform(there_and_back(tree), tree), tree)


@quick
@hypothesis.given(TREES, st.data())
def test_damaged_messages_are_read_or_refused(tree, data):
    """A message with bytes cut, replaced or inserted gives a tree or ValueError, nothing else."""
    message = bytearray(codec.encode(tree))
    for _ in range(data.draw(st.integers(1, 4))):
        at = data.draw(st.integers(0, len(message)))
        end = at + data.draw(st.integers(0, 8))
        message[at:end] = data.draw(st.binary(max_size=8))
    try:
        back = codec.decode(bytes(message))
    except ValueError:
        return
    repr(back)
    codec.encode(back)


@quick
@hypothesis.given(st.binary(max_size=200))
def test_any_header_is_read_or_refused(header):
    with contextlib.suppress(ValueError):
        repr(codec.decode(message(header, bytes(64))))
