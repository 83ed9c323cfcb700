"""Games of several seats, as builders of environments for pools.

``EnvConfig("rlstack.envs.seats.games:SupplyChain", num_envs=24)`` is eight chains of three
facilities. The game classes are in the modules; their docstrings state the rules.
"""

from __future__ import annotations

from rlstack.envs.seats import connect_four, matches, rock_paper_scissors, supply_chain
from rlstack.envs.seats.game import Seats

__all__ = ["ConnectFour", "Matches", "RockPaperScissors", "SupplyChain"]

ConnectFour = Seats(connect_four.ConnectFour)
Matches = Seats(matches.Matches)
RockPaperScissors = Seats(rock_paper_scissors.RockPaperScissors)
SupplyChain = Seats(supply_chain.SupplyChain)
