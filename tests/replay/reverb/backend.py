"""The Reverb replay as a backend of the contract suite, and the tests where it differs."""

from __future__ import annotations

import contextlib
import tempfile
from typing import Any

import jax
import pytest

from rlstack.replay.reverb import ReverbReplayBuffer, ReverbServer, binding
from tests.replay.replay_model import make_transition

INSTALLED = binding.available()

# Tests of the contract suite whose requirement Reverb does not meet, with the reason.
DIFFERENT = {
    "test_any_history_agrees_with_the_model": "the oldest item of all environments makes room, and "
    "a full fifo waits: test_reverb.py has what holds instead",
    "test_room_for_less_than_a_batch_is_refused": "max_size_per_env bounds only the total",
    "test_fifo_full_drops_the_oldest_and_counts": "a full fifo waits as "
    "soon as items are under way: own in test_reverb.py",
    "test_a_broken_item_takes_its_turn": "an item never made pushes nothing out",
    "test_load_goes_on_as_if_never_interrupted[reverb-uniform]": "the generator is the server's",
    "test_load_goes_on_as_if_never_interrupted[reverb-prioritized]": "so it is here",
    "test_same_seed_same_samples": "the generator is the server's, and takes no seed",
    "test_prioritized_keys_of_items_that_left_are_ignored": "keys are random, not in order of age: "
    "own in test_reverb.py",
    "test_uniform_is_uniform": "holds more items where starts are refused: own in test_reverb.py",
}
# Tests that make thousands of calls: with a server they take minutes, in memory ten seconds.
SLOW = {"test_no_setting_keeps_a_single_process_waiting_for_ever"}
HISTORIES = {"test_any_history_agrees_with_the_model"}  # also slow where calls are encoded


def spec() -> Any:
    """Shapes and dtypes of the suite's steps."""
    one = make_transition([0], [0], [0])
    return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape[1:], x.dtype), one)


class Backends:
    """Makes buffers, each with its own server; closes them all."""

    waits = True  # while the buffer is full; other backends drop items

    def __init__(self) -> None:
        self._open: list[contextlib.ExitStack] = []

    def __call__(self, cfg, num_envs, seed=0, **options):
        """Makes a buffer without pending inserts and without prefetch."""
        while len(self._open) > 8:  # hypothesis makes hundreds
            self._open.pop(0).close()
        stack = contextlib.ExitStack()
        self._open.append(stack)
        folder = stack.enter_context(tempfile.TemporaryDirectory())
        server = ReverbServer(cfg, num_envs, spec(), checkpoint_dir=f"{folder}/checkpoints")
        stack.callback(server.close)
        options = {"prefetch": 0, "max_pending": 0, **options}
        buffer = ReverbReplayBuffer(cfg, num_envs, server, spec(), **options)
        stack.callback(buffer.close)
        return buffer

    def close(self) -> None:
        """Closes what is still open."""
        while self._open:
            self._open.pop().close()


make = Backends()


@pytest.fixture(autouse=True, scope="module")
def no_reverb_server_left():
    yield
    make.close()


@pytest.hookimpl(tryfirst=True)  # runs before pytest deselects tests by their marks
def pytest_collection_modifyitems(items):
    for item in items:
        if item.originalname in (SLOW | HISTORIES if "[served" in item.name else SLOW):
            item.add_marker(pytest.mark.slow)
            if "[in_process" in item.name or "[shared_memory" in item.name:
                item.add_marker(pytest.mark.chosen)
        if "[reverb" not in item.name:
            continue
        item.add_marker(pytest.mark.launchpad)
        item.add_marker(pytest.mark.skipif(not INSTALLED, reason="Reverb is not installed"))
        for name, reason in DIFFERENT.items():
            if item.name == name or item.name.split("[")[0] == name:
                item.add_marker(pytest.mark.skip(reason=f"Reverb: {reason}"))
