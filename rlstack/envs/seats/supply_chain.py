"""A serial supply chain of a few facilities, each a seat, in the manner of the beer game."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

import numpy as np
from dm_env import specs

from rlstack.envs.seats.protocol import GameStep

CHOICES = 9  # orders from 4 below the last demand to 4 above it
_ORDERS = tuple(f"demand{more:+}" if more else "demand" for more in range(-4, 5))
_MAX_DEMAND = 8  # largest weekly demand of customers, uniform from 0
_SCALE = 10.0  # divisor of the numbers in observations, and of costs in rewards
_MOST = 40.0  # largest number in observations, before scaling
_SEATS = ("retailer", "wholesaler", "distributor", "factory")


class SupplyChain:
    """Facilities in a row: customers order from the retailer, each facility from the next one.

    In each week a facility receives what arrives, then the orders from downstream, ships what it
    can, and owes the rest. What is shipped arrives ``delay`` weeks after the order. The last
    facility orders from a supplier that has everything. Each facility decides by its own numbers.
    Its costs of a week are the sum of ``holding`` for each unit in stock and ``shortage`` for each
    unit owed.

    With ``shared`` 0 each facility pays its own costs, and no facility pays what its orders cost
    the others. With 1 all pay the mean of the chain; with a number between, this part of it.

    Observation: ``[4 + facilities]`` float32: stock, units owed, units ordered and not received,
    the last demand, each divided by 10; then the number of the facility, one-hot. Action: the
    order, as its difference from the last demand plus 4, 0 to 8. Reward: minus what the facility
    pays for the week, divided by 10. Episodes are truncated after ``weeks``. Seats: retailer,
    distributor and factory with three facilities; a fourth is the wholesaler.
    """

    def __init__(
        self,
        facilities: int = 3,
        weeks: int = 40,
        delay: int = 2,
        holding: float = 1.0,
        shortage: float = 2.0,
        shared: float = 0.0,
        seed: int = 0,
    ):
        if not 2 <= facilities <= len(_SEATS):
            raise ValueError(
                f"SupplyChain: facilities must be 2 to {len(_SEATS)}; got {facilities}."
            )
        if weeks < 1 or delay < 1:
            raise ValueError(
                f"SupplyChain: weeks and delay must be at least 1; got {weeks} and {delay}."
            )
        if not 0.0 <= shared <= 1.0:
            raise ValueError(f"SupplyChain: shared must be 0 to 1; got {shared}.")
        chosen = {2: (0, 3), 3: (0, 2, 3), 4: (0, 1, 2, 3)}[facilities]
        self.seats = tuple(_SEATS[i] for i in chosen)
        most = _MOST / _SCALE
        self.observation_spec = specs.BoundedArray(
            (4 + facilities,), np.float32, -most, most, "facility"
        )
        self.action_spec = specs.DiscreteArray(CHOICES, np.int32, "order")
        self.action_names = _ORDERS
        self._weeks, self._delay, self._costs = weeks, delay, (holding, shortage)
        self._shared = shared
        self._rng = np.random.default_rng(seed)
        self._week = 0
        self._stock = np.zeros(facilities, np.int64)
        self._owed = np.zeros(facilities, np.int64)
        self._ordered = np.zeros(facilities, np.int64)  # and not received
        self._demand = np.zeros(facilities, np.int64)
        self._transit: list[deque[int]] = []

    def __str__(self) -> str:
        """Returns a line for each facility."""
        rows = zip(self.seats, self._stock, self._owed, self._ordered, self._demand, strict=True)
        lines = [
            f"{name:11} stock {stock:3}, owes {owed:3}, waits for {ordered:3}, last demand {demand}"
            for name, stock, owed, ordered, demand in rows
        ]
        return "\n".join([f"week {self._week} of {self._weeks}", *lines])

    def reset(self) -> list[np.ndarray]:
        """Starts with a stock of 12 in each facility, and nothing ordered."""
        number = len(self.seats)
        self._week = 0
        self._stock = np.full(number, 12)
        self._owed, self._ordered = np.zeros(number, np.int64), np.zeros(number, np.int64)
        self._demand = np.full(number, _MAX_DEMAND // 2)
        self._transit = [deque([0] * self._delay) for _ in range(number)]
        return self._observe()

    def step(self, actions: Sequence[np.ndarray]) -> GameStep:
        """Orders, delivers, and counts the costs of the week."""
        orders = np.maximum(self._demand + np.asarray(actions, np.int64) - CHOICES // 2, 0)
        customers = int(self._rng.integers(_MAX_DEMAND + 1))
        arriving = np.array([transit.popleft() for transit in self._transit])
        self._stock += arriving
        self._ordered += orders - arriving
        self._demand = np.concatenate([[customers], orders[:-1]])
        wanted = self._owed + self._demand
        shipped = np.minimum(self._stock, wanted)
        self._stock, self._owed = self._stock - shipped, wanted - shipped
        # The supplier of the last facility ships all that is ordered.
        for transit, units in zip(self._transit, [*shipped[1:], orders[-1]], strict=True):
            transit.append(int(units))
        self._week += 1
        holding, shortage = self._costs
        costs = holding * self._stock + shortage * self._owed
        paid = (1.0 - self._shared) * costs + self._shared * costs.mean()
        ones = [1.0] * len(self.seats)
        return GameStep(
            self._observe(),
            (-paid / _SCALE).tolist(),
            ones,
            last=self._week >= self._weeks,
            infos=[{"chain_cost": float(costs.sum())}] * len(self.seats),
        )

    def _observe(self) -> list[np.ndarray]:
        numbers = np.stack([self._stock, self._owed, self._ordered, self._demand], axis=1)
        scaled = np.minimum(numbers, _MOST) / _SCALE
        seen = np.concatenate([scaled, np.eye(len(self.seats))], axis=1).astype(np.float32)
        return list(seen)
