"""The wrapper: states, actions and rewards of the simulator, as a Gymnasium environment.

An action names a target for each facility: how many days of expected demand it should have in stock
and on the road. The wrapper orders what is missing. A facility that has more orders nothing.
"""

from __future__ import annotations

from typing import Any, Literal

import gymnasium
import numpy as np
from gymnasium import spaces

from supply_chain.simulator import (
    CAPACITY,
    DAYS,
    FACILITIES,
    KNOWN_DAYS,
    LEAD_TIMES,
    MEAN_DEMAND,
    SHOPS,
    Report,
    SupplyChain,
)

# The days of cover that a discrete action chooses from, by facility. 0 orders nothing. The
# warehouse's cover counts the goods in the shops too.
CHOICES = ((0.0, 7.0, 8.5, 10.0), (0.0, 2.5, 3.5, 4.5), (0.0, 2.5, 3.5, 4.5))
LARGEST_LEVELS = (250.0, 80.0, 60.0)  # units, of the action `levels`
Actions = Literal["cover", "choices", "joint", "levels"]
Scenarios = Literal["training", "held_out"]


class SupplyChainEnv(gymnasium.Env):
    """The supply chain as one decision maker sees it, who orders for all facilities once a day.

    The reward is the day's profit. An episode is truncated after `DAYS` days: the business goes on.

    Observation, a dict of float32 arrays:

    - ``cover`` [facilities]: how long stock and goods on the road last, as a fraction of
      `KNOWN_DAYS`. The warehouse's counts the shops' too.
    - ``stock`` [facilities] and ``on_the_road`` [sum of the lead times]: as fractions of capacity.
    - ``forecast`` [shops, KNOWN_DAYS]: expected demand from today on, as multiples of the mean.
    """

    def __init__(self, actions: Actions = "cover", scenarios: Scenarios = "training"):
        """Chooses the actions and the customers.

        Args:
          actions: ``cover``: a number in [-1, 1] for each facility, from 0 to `KNOWN_DAYS` days.
            ``choices``: one of `CHOICES` for each facility. ``joint``: one number for all
            facilities, for agents that know a single discrete action. ``levels``: a number in
            [-1, 1] for each facility, from 0 to `LARGEST_LEVELS` units instead of days.
          scenarios: ``training``, or ``held_out`` ones, which no training episode has.
        """
        sizes = [len(days) for days in CHOICES]
        numbers = spaces.Box(-1.0, 1.0, (len(FACILITIES),), np.float32)
        kinds: dict[str, gymnasium.Space] = {
            "cover": numbers,
            "levels": numbers,
            "choices": spaces.MultiDiscrete(sizes),
            "joint": spaces.Discrete(int(np.prod(sizes))),
        }
        if actions not in kinds:
            raise ValueError(f"actions must be one of {', '.join(kinds)}; got {actions!r}.")
        if scenarios not in ("training", "held_out"):
            raise ValueError(f"scenarios must be training or held_out; got {scenarios!r}.")
        self.action_space = kinds[actions]
        shapes = {
            "cover": (len(FACILITIES),),
            "forecast": (len(SHOPS), KNOWN_DAYS),
            "on_the_road": (sum(LEAD_TIMES),),
            "stock": (len(FACILITIES),),
        }
        self.observation_space = spaces.Dict(
            {name: spaces.Box(0.0, np.inf, shape, np.float32) for name, shape in shapes.items()}
        )
        self._actions, self._held_out = actions, scenarios == "held_out"
        self._sizes = sizes

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[dict[str, np.ndarray], dict[str, Any]]:
        """Starts an episode with new customers; equal seeds give equal series of episodes."""
        super().reset(seed=seed)
        number = int(self.np_random.integers(2**31))
        self._chain = SupplyChain(np.random.default_rng([self._held_out, number]))
        self._reports: list[Report] = []
        return self.state(), {}

    def step(
        self, action: Any
    ) -> tuple[dict[str, np.ndarray], float, bool, bool, dict[str, float]]:
        """Orders, runs the day, and answers with its profit."""
        report = self._chain.step(self.orders(action))
        self._reports.append(report)
        over = self._chain.day == DAYS
        return self.state(), report.profit, False, over, self._summary() if over else {}

    def state(self) -> dict[str, np.ndarray]:
        """Encodes what the decision maker sees."""
        chain = self._chain
        self._forecasts = [chain.forecast(shop) for shop in range(len(SHOPS))]
        both = [north + south for north, south in zip(*self._forecasts, strict=True)]
        self._known = [both, *self._forecasts]  # by facility
        held = [
            units + sum(road) for units, road in zip(chain.stock, chain.on_the_road, strict=True)
        ]
        self._positions = [sum(held), *held[1:]]
        means = (sum(MEAN_DEMAND), *MEAN_DEMAND)
        known_positions = zip(self._known, self._positions, means, strict=True)
        road = [
            units / space
            for facility, space in zip(chain.on_the_road, CAPACITY, strict=True)
            for units in facility
        ]
        values = {
            "cover": [cover(*which) / KNOWN_DAYS for which in known_positions],
            "forecast": [
                [units / mean for units in shop]
                for shop, mean in zip(self._forecasts, MEAN_DEMAND, strict=True)
            ],
            "on_the_road": road,
            "stock": [units / space for units, space in zip(chain.stock, CAPACITY, strict=True)],
        }
        return {name: np.array(value, np.float32) for name, value in values.items()}

    def orders(self, action: Any) -> list[float]:
        """Returns the units that an action orders, by facility."""
        missing = zip(self.targets(action), self._positions, strict=True)
        return [max(0.0, target - held) for target, held in missing]

    def targets(self, action: Any) -> list[float]:
        """Returns the units that each facility should have in stock and on the road."""
        if self._actions == "levels":
            levels = zip(action, LARGEST_LEVELS, strict=True)
            return [0.5 * (float(x) + 1.0) * largest for x, largest in levels]
        days = self.days_of(action)
        return [units_for(*which) for which in zip(self._known, days, strict=True)]

    def days_of(self, action: Any) -> list[float]:
        """Returns the days of cover that an action asks for, by facility."""
        if self._actions == "cover":
            return [0.5 * (float(x) + 1.0) * KNOWN_DAYS for x in action]
        if self._actions == "joint":
            action = np.unravel_index(int(action), self._sizes)
        return [days[int(choice)] for days, choice in zip(CHOICES, action, strict=True)]

    def _summary(self) -> dict[str, float]:
        """Returns numbers of the episode to log."""
        total = Report(*(sum(column) for column in zip(*self._reports, strict=True)))
        return {
            "service": total.sold / max(total.demand, 1.0),
            "lorries": total.lorries,
            "spoiled": total.spoiled,
            "storage": total.storage,
        }


def units_for(expected: list[float], days: float) -> float:
    """Returns the expected demand of the next days; the last day may be a part of one."""
    whole = int(days)
    units = sum(expected[:whole])
    return units + (days - whole) * expected[whole] if whole < len(expected) else units


def cover(expected: list[float], units: float, mean: float) -> float:
    """Returns how many days an amount lasts: the inverse of `units_for`.

    Args:
      expected: the expected demand of each known day.
      units: the amount.
      mean: the demand of a day beyond the known ones.
    """
    for day, demand in enumerate(expected):
        if units < demand:
            return day + units / demand
        units -= demand
    return len(expected) + units / mean
