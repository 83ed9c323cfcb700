"""The simulator: a warehouse supplies two shops, which sell to customers.

It knows nothing of reinforcement learning. Quantities are units of goods, times are days, and money
has no currency.

Each day has this order: goods arrive; lorries leave with the orders of the day; customers buy;
some of the goods in the shops spoil; stored goods cost money. A sale that fails for lack of goods
is lost. A lorry costs the same whatever it carries, and one lorry serves both shops on its tour.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

FACILITIES = ("warehouse", "north", "south")
SHOPS = FACILITIES[1:]
DAYS = 56  # of an episode: eight weeks
WEEK = (0.6, 0.6, 0.8, 0.9, 1.2, 1.7, 1.2)  # demand by weekday, as a multiple of the mean
MEAN_DEMAND = (12.0, 8.0)  # units a day, by shop
PROMOTION_CHANCE = 0.08  # that a promotion begins, each day without one
PROMOTION_DAYS = 2
PROMOTION_FACTOR = 2.5
KNOWN_DAYS = 10  # from today on: how far ahead demand is expected and promotions announced
LEAD_TIMES = (3, 1, 1)  # days from an order to its arrival, by facility
CAPACITY = (120.0, 60.0, 40.0)  # largest stock; what does not fit is sent back without payment

PRICE, COST = 5.0, 3.0  # of a unit
GOODWILL = 1.0  # lost with every sale that fails, besides the margin
SUPPLIER_LORRY, TOUR_LORRY = 20.0, 8.0
STORAGE = (0.04, 0.08, 0.08)  # of a unit for a day, by facility
SPOILAGE = 0.04  # fraction of a shop's stock that spoils in a day


class Report(NamedTuple):
    """What happened on one day, in money unless it says otherwise."""

    margin: float  # of what was sold
    lost: float  # goodwill lost
    lorries: float
    storage: float
    spoiled: float
    demand: float  # units that customers wanted
    sold: float  # units that they got

    @property
    def profit(self) -> float:
        """The day's profit."""
        return self.margin - self.lost - self.lorries - self.storage - self.spoiled


class SupplyChain:
    """One episode: `DAYS` days from a random stock, with demand that orders do not change."""

    def __init__(self, scenario: np.random.Generator):
        """Draws the calendar, the demand and the first stock.

        Args:
          scenario: the source of everything that is random. Two episodes with equal generators
            have equal customers, whatever is ordered.
        """
        self.weekday = int(scenario.integers(7))
        expected = np.stack([self._calendar(scenario, mean) for mean in MEAN_DEMAND])
        self.expected: list[list[float]] = expected.tolist()  # [shops][DAYS + KNOWN_DAYS]
        self._demand: list[list[int]] = scenario.poisson(expected).tolist()
        full = scenario.uniform(0.2, 0.6, len(FACILITIES))
        self.stock: list[float] = (full * CAPACITY).tolist()  # units, by facility
        # Units on the road by facility; entry 0 arrives tomorrow.
        self.on_the_road: list[list[float]] = [[0.0] * days for days in LEAD_TIMES]
        self.day = 0

    def _calendar(self, scenario: np.random.Generator, mean: float) -> np.ndarray:
        """Returns a shop's expected demand of each day."""
        days = np.arange(DAYS + KNOWN_DAYS)
        expected = mean * np.asarray(WEEK)[(days + self.weekday) % 7]
        begins = scenario.random(len(days)) < PROMOTION_CHANCE
        day = 0
        while day < len(days):
            if begins[day]:
                expected[day : day + PROMOTION_DAYS] *= PROMOTION_FACTOR
                day += PROMOTION_DAYS
            day += 1
        return expected

    def forecast(self, shop: int) -> list[float]:
        """Returns the expected demand of a shop today and on the next days, ``[KNOWN_DAYS]``."""
        return self.expected[shop][self.day : self.day + KNOWN_DAYS]

    def step(self, orders: list[float]) -> Report:
        """Runs one day.

        Args:
          orders: units ordered by each facility: by the warehouse from the supplier, by the shops
            from the warehouse. If the shops order more than there is, each gets the same fraction.
        """
        stock, road = self.stock, self.on_the_road
        wanted = orders[1] + orders[2]
        fraction = min(1.0, stock[0] / wanted) if wanted > 0 else 0.0
        sent = [orders[0], orders[1] * fraction, orders[2] * fraction]
        stock[0] -= sent[1] + sent[2]
        lorries = SUPPLIER_LORRY * (sent[0] > 0) + TOUR_LORRY * (sent[1] + sent[2] > 0)
        for facility, units in enumerate(sent):
            road[facility][-1] += units

        demand, sold, spoiled = 0.0, 0.0, 0.0
        for shop, facility in enumerate((1, 2)):
            customers = self._demand[shop][self.day]
            bought = min(customers, stock[facility])
            rotten = SPOILAGE * (stock[facility] - bought)
            stock[facility] -= bought + rotten
            demand, sold, spoiled = demand + customers, sold + bought, spoiled + rotten
        storage = sum(units * cost for units, cost in zip(stock, STORAGE, strict=True))

        self.day += 1
        for facility, space in enumerate(CAPACITY):
            stock[facility] = min(space, stock[facility] + road[facility].pop(0))
            road[facility].append(0.0)
        return Report(
            margin=(PRICE - COST) * sold,
            lost=GOODWILL * (demand - sold),
            lorries=lorries,
            storage=storage,
            spoiled=COST * spoiled,
            demand=demand,
            sold=sold,
        )
