"""Earlier versions of a policy, for self-play: which are kept, and which plays an episode.

Fictitious self-play (Heinrich et al., 2015) plays against the uniform mixture of all earlier
versions. Prioritised fictitious self-play (AlphaStar; Vinyals et al., 2019) plays more often
against those that the policy still loses to.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np

from rlstack.programs.build.policies.members import Member
from rlstack.programs.config.member_config import HistoryConfig
from rlstack.storage import checkpoint
from rlstack.types import Array, Params, PyTree

FORGETTING = 0.98  # weight of the earlier games of a version after each further one
PRIOR = 1.0  # a version's games before the first, half of them won


class Versions:
    """The versions of one policy.

    Each version has a slot. A new version takes a free slot, or the slot of a version that it
    replaces.
    """

    def __init__(self, cfg: HistoryConfig, params: Params) -> None:
        """Saves the initial params as the first version.

        Args:
          cfg: the number of versions to keep, and how to draw the one that plays.
          params: the initial params of the policy.
        """
        self._cfg = cfg
        size = cfg.max_versions
        self._params = jax.tree.map(lambda x: np.zeros((size, *x.shape), x.dtype), params)
        # The policy's frames when each version was saved; -1 for a free slot.
        self._frames = np.full(size, -1, np.int64)
        self._ids = np.zeros(size, np.int64)  # versions are numbered from 1
        self._games = np.zeros(size)  # number of games against the policy; older games count less
        self._wins = np.zeros(size)  # number of the policy's wins in them
        self._on_device: dict[int, tuple[int, Params]] = {}
        self.add(0, params)

    @property
    def slots(self) -> np.ndarray:
        """The slots with a version, the oldest version first."""
        held = np.flatnonzero(self._frames >= 0)
        return held[np.argsort(self._frames[held], kind="stable")]

    @property
    def frames(self) -> np.ndarray:
        """The frames of the policy at each version, in the order of `slots`."""
        return self._frames[self.slots]

    @property
    def win_rates(self) -> np.ndarray:
        """The policy's estimated win rate against each version, in the order of `slots`.

        A draw counts as half a win. Before the first game it is 1/2.
        """
        slots = self.slots
        return (self._wins[slots] + PRIOR / 2) / (self._games[slots] + PRIOR)

    def stats(self) -> dict[str, float]:
        """Returns what is logged of the versions."""
        return {"versions": len(self.slots), "mean_win_rate": float(self.win_rates.mean())}

    @property
    def next_due(self) -> int:
        """The frames of the policy at which the next version should be saved."""
        return (int(self._frames.max()) // self._cfg.period + 1) * self._cfg.period

    def is_due(self, frames: int) -> bool:
        """Whether a version should be saved when the policy has made this number of frames."""
        return frames >= self.next_due

    def add(self, frames: int, params: Params) -> int:
        """Saves a version, if necessary in place of an older one; returns its slot."""
        slots = self.slots
        if len(slots) < self._cfg.max_versions:
            slot = int(np.flatnonzero(self._frames < 0)[0])
        else:
            at = self._frames[slots]
            # Replaces the version with the smallest gap around it. The first version stays.
            gaps = np.append(at[2:], frames) - at[:-1]
            slot = int(slots[1 + int(np.argmin(gaps))])
        self._frames[slot], self._ids[slot] = frames, self._ids.max() + 1
        self._games[slot] = self._wins[slot] = 0.0
        for into, leaf in zip(jax.tree.leaves(self._params), jax.tree.leaves(params), strict=True):
            into[slot] = np.asarray(leaf)
        return slot

    def params(self, slot: int) -> tuple[int, Params]:
        """Returns the number and the params of the version in a slot, on the device."""
        number = int(self._ids[slot])
        held = self._on_device.get(slot)
        if held is None or held[0] != number:
            held = number, jax.tree.map(lambda x: jnp.array(x[slot]), self._params)
            self._on_device[slot] = held
        return held

    @property
    def every(self) -> Params:
        """The params in all slots, ``[max_versions, ...]``, in numpy."""
        return self._params

    @property
    def slot_frames(self) -> np.ndarray:
        """The frames of the policy at the version in each slot, [max_versions]; 0 if free."""
        return np.maximum(self._frames, 0)

    @property
    def results(self) -> tuple[np.ndarray, np.ndarray]:
        """The games of the policy against the version in each slot, and those that it won."""
        return self._games, self._wins

    @results.setter
    def results(self, results: tuple[Array, Array]) -> None:
        self._games, self._wins = (np.array(x, np.float64) for x in results)

    @property
    def numbers(self) -> np.ndarray:
        """The number of the version in each slot, [max_versions]; 0 for a free one."""
        return self._ids.copy()

    def number_of(self, slot: int) -> int:
        """Returns the number of the version in a slot; a later version has a higher one."""
        return int(self._ids[slot])

    def news(self, known: np.ndarray) -> PyTree:
        """Returns the versions and results that a copy of these versions lacks, for its `take`.

        Args:
          known: ``[max_versions]`` the `numbers` of the copy.
        """
        changed = np.flatnonzero((self._ids != known) & (self._ids > 0))
        return {
            "changed": changed,
            "params": jax.tree.map(lambda x: x[changed], self._params),
            **self._tables(),
        }

    def take(self, news: PyTree) -> np.ndarray:
        """Applies an update from `news`; returns the slots that now hold another version."""
        changed = np.asarray(news["changed"])
        new = jax.tree.leaves(news["params"])
        for into, leaf in zip(jax.tree.leaves(self._params), new, strict=True):
            into[changed] = leaf
        self._set_tables(news)
        return changed

    def probabilities(self, draw: str) -> np.ndarray:
        """Returns the probability of each version, in the order of `slots`.

        Args:
          draw: see `HistoryConfig.draw`.
        """
        number = len(self.slots)
        if draw == "latest":
            return np.eye(number)[-1]
        if draw == "prioritised":
            weights = (1.0 - self.win_rates) ** 2
            return weights / weights.sum()
        return np.full(number, 1.0 / number)

    def draw(self, rng: np.random.Generator, number: int, draw: str) -> np.ndarray:
        """Returns the slots of the versions that play this number of episodes."""
        return rng.choice(self.slots, number, p=self.probabilities(draw))

    def record(self, slot: int, score: float) -> None:
        """Records the policy's score against a version: 1 for a win, 1/2 for a draw, else 0."""
        self._games[slot] = FORGETTING * self._games[slot] + 1.0
        self._wins[slot] = FORGETTING * self._wins[slot] + score

    def save(self) -> PyTree:
        """Returns all versions, for a checkpoint."""
        return {"params": jax.tree.map(np.copy, self._params), **self._tables()}

    def load(self, saved: PyTree) -> None:
        """Restores what `save` returned."""

        self._params = jax.tree.map(np.array, saved["params"])  # which can be written to
        self._set_tables(saved)
        self._on_device.clear()

    def _tables(self) -> dict[str, np.ndarray]:
        return {
            "frames": self._frames.copy(),
            "ids": self._ids.copy(),
            "games": self._games.copy(),
            "wins": self._wins.copy(),
        }

    def _set_tables(self, saved: Mapping[str, Array]) -> None:
        self._frames, self._ids = np.array(saved["frames"]), np.array(saved["ids"])
        self._games, self._wins = np.array(saved["games"]), np.array(saved["wins"])


def read_versions(path: Path, member: Member, params: Params) -> Versions:
    """Reads the versions of a policy from a checkpoint.

    Args:
      path: path of the checkpoint.
      member: the policy that plays the versions.
      params: params with the shapes of the versions, from the policy whose versions they are.

    Raises:
      ValueError: the checkpoint holds only params, like the checkpoint of the best evaluation.
    """
    versions = Versions(member.cfg.history, params)
    wanted = {"policies": {member.name: {"inferencer": {"versions": versions.save()}}}}
    saved = checkpoint.restore(path, wanted, partial=True)
    versions.load(saved["policies"][member.name]["inferencer"]["versions"])
    return versions
