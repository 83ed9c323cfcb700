"""The check of actions, against comparing each number with the bounds."""

import re

import numpy as np
import pytest
from dm_env import specs
from hypothesis import given
from hypothesis import strategies as st

from rlstack.envs.backend import ActionCheck

DISCRETE = specs.DiscreteArray(3)
SHIFTED = specs.BoundedArray((), np.int32, -1, 1)
PAIR = specs.BoundedArray((2,), np.int32, 0, 1)
UNEQUAL = specs.BoundedArray((2,), np.int32, 0, [1, 2])
BOOLS = specs.BoundedArray((), np.bool_, False, True)
MANY_VALUES = specs.BoundedArray((), np.int32, 0, 5000)
BYTE = specs.BoundedArray((), np.uint8, 0, 255)
UNBOUNDED = specs.Array((), np.int32)


def check(spec: specs.Array, offset: int = 0) -> ActionCheck:
    return ActionCheck(spec, "", spec.dtype, offset, copy=False)


@given(
    spec=st.sampled_from([DISCRETE, SHIFTED, PAIR, UNEQUAL, MANY_VALUES, BYTE, UNBOUNDED]),
    dtype=st.sampled_from([np.int8, np.int32, np.int64]),
    rows=st.sampled_from([1, 8, 64, 65, 300]),
    wrong=st.one_of(st.none(), st.integers(-128, 127)),
    data=st.data(),
)
def test_an_integer_is_wrong_exactly_if_it_is_outside_the_bounds(spec, dtype, rows, wrong, data):
    low = np.asarray(getattr(spec, "minimum", -(2**31)))
    high = np.asarray(getattr(spec, "maximum", 2**31))
    actions = np.ones((rows, *spec.shape), dtype)
    if wrong is not None:
        actions.flat[data.draw(st.integers(0, actions.size - 1))] = wrong
    outside = (actions < low) | (actions > high)
    if not outside.any():
        np.testing.assert_array_equal(check(spec)(actions, rows), actions)
        return
    row = np.argwhere(outside)[0][0]
    with pytest.raises(ValueError, match=rf"must lie in .*; got {wrong} in row {row}\."):
        check(spec)(actions, rows)


@pytest.mark.parametrize("rows", [8, 300])
def test_bools_and_numbers_without_a_sign_are_actions(rows):
    np.testing.assert_array_equal(check(BOOLS)(np.ones(rows, bool), rows), True)
    np.testing.assert_array_equal(check(DISCRETE)(np.full(rows, 2, np.uint8), rows), 2)
    with pytest.raises(ValueError, match="got 3 in row 0"):
        check(DISCRETE)(np.full(rows, 3, np.uint8), rows)


def test_the_environments_own_numbers_may_begin_elsewhere():
    np.testing.assert_array_equal(check(DISCRETE, offset=5)(np.array([0, 2]), 2), [5, 7])


@pytest.mark.parametrize("bounds", [(), (-1.0, 1.0)])
def test_real_numbers_are_clipped_and_nan_is_an_error(bounds):
    spec = (
        specs.BoundedArray((2,), np.float32, *bounds) if bounds else specs.Array((2,), np.float32)
    )
    actions = np.array([[0.5, -3.0], [np.inf, -np.inf], [1e30, -1e30]], np.float32)
    wanted = np.clip(actions, *bounds) if bounds else actions
    np.testing.assert_array_equal(check(spec)(actions, 3), wanted)
    actions[1, 0] = np.nan
    message = re.escape("must not hold NaN; got it in row(s) [1].")
    with pytest.raises(ValueError, match=message):
        check(spec)(actions, 3)
