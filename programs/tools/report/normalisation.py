"""Scores of different tasks on one scale, on which 0 and 1 mean the same in each task."""

from __future__ import annotations

import dataclasses
import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np

from rlstack.storage import files

Range = tuple[float, float]  # the returns that become 0 and 1

# Returns of random play and of a human tester, in episodes that begin with up to 30 no-ops, as Wang
# et al. (2016), https://arxiv.org/abs/1511.06581, print them (random, human). Badia et al. (2020),
# https://arxiv.org/abs/2003.13350, use the same. Mnih et al. (2015) have others for some games.
ATARI: dict[str, Range] = {
    "alien": (227.8, 7127.7),
    "amidar": (5.8, 1719.5),
    "assault": (222.4, 742.0),
    "asterix": (210.0, 8503.3),
    "asteroids": (719.1, 47388.7),
    "atlantis": (12850.0, 29028.1),
    "bankheist": (14.2, 753.1),
    "battlezone": (2360.0, 37187.5),
    "beamrider": (363.9, 16926.5),
    "berzerk": (123.7, 2630.4),
    "bowling": (23.1, 160.7),
    "boxing": (0.1, 12.1),
    "breakout": (1.7, 30.5),
    "centipede": (2090.9, 12017.0),
    "choppercommand": (811.0, 7387.8),
    "crazyclimber": (10780.5, 35829.4),
    "defender": (2874.5, 18688.9),
    "demonattack": (152.1, 1971.0),
    "doubledunk": (-18.6, -16.4),
    "enduro": (0.0, 860.5),
    "fishingderby": (-91.7, -38.7),
    "freeway": (0.0, 29.6),
    "frostbite": (65.2, 4334.7),
    "gopher": (257.6, 2412.5),
    "gravitar": (173.0, 3351.4),
    "hero": (1027.0, 30826.4),
    "icehockey": (-11.2, 0.9),
    "jamesbond": (29.0, 302.8),
    "kangaroo": (52.0, 3035.0),
    "krull": (1598.0, 2665.5),
    "kungfumaster": (258.5, 22736.3),
    "montezumarevenge": (0.0, 4753.3),
    "mspacman": (307.3, 6951.6),
    "namethisgame": (2292.3, 8049.0),
    "phoenix": (761.4, 7242.6),
    "pitfall": (-229.4, 6463.7),
    "pong": (-20.7, 14.6),
    "privateeye": (24.9, 69571.3),
    "qbert": (163.9, 13455.0),
    "riverraid": (1338.5, 17118.0),
    "roadrunner": (11.5, 7845.0),
    "robotank": (2.2, 11.9),
    "seaquest": (68.4, 42054.7),
    "skiing": (-17098.1, -4336.9),
    "solaris": (1236.3, 12326.7),
    "spaceinvaders": (148.0, 1668.7),
    "stargunner": (664.0, 10250.0),
    "surround": (-10.0, 6.5),
    "tennis": (-23.8, -8.3),
    "timepilot": (3568.0, 5229.2),
    "tutankham": (11.4, 167.6),
    "upndown": (533.4, 11693.2),
    "venture": (0.0, 1187.5),
    "videopinball": (16256.9, 17667.9),
    "wizardofwor": (563.5, 4756.5),
    "yarsrevenge": (3092.9, 54576.9),
    "zaxxon": (32.5, 9173.3),
}

# Returns of a random policy and of a trained expert: Fu et al. (2020), D4RL,
# https://arxiv.org/abs/2004.07219.
MUJOCO: dict[str, Range] = {
    "ant": (-325.6, 3879.7),
    "halfcheetah": (-280.178953, 12135.0),
    "hopper": (-20.272305, 3234.3),
    "walker2d": (1.629008, 4592.3),
}

_TABLES = {
    "atari": ("human-normalised: 0 is random play, 1 a human tester (Wang et al. 2016)", ATARI),
    "mujoco": ("normalised: 0 is a random policy, 1 an expert (D4RL, Fu et al. 2020)", MUJOCO),
}
_WAY_OUT = "It takes none, atari, mujoco, two numbers MIN MAX, or a JSON file of tasks"


@dataclasses.dataclass(frozen=True)
class Normalisation:
    """The linear map of returns to scores of each task."""

    text: str
    """The description of the normalisation in a report."""
    ranges: Mapping[str, Range]
    """The returns that become 0 and 1, by the simple name of the task."""
    default: Range | None = None
    """The returns that become 0 and 1 in tasks that are not in `ranges`; None for an error."""

    def __call__(self, environment: str, returns: Sequence[float] | np.ndarray) -> np.ndarray:
        """Returns the scores of returns in an environment.

        Raises:
          ValueError: the returns of this environment are not known.
        """
        found = self.ranges.get(simple_name(environment), self.default)
        if found is None:
            known = ", ".join(sorted(self.ranges))
            raise ValueError(
                f"--normalise must know the returns of each task; {environment} is not one of "
                f"{known}. Name two numbers MIN MAX for all tasks, or a JSON file with "
                f'{{"{environment}": [MIN, MAX], ...}}.'
            )
        low, high = found
        return (np.asarray(returns, float) - low) / (high - low)


def from_words(words: Sequence[str]) -> Normalisation | None:
    """Returns the normalisation that an option names: see `_WAY_OUT`; None if it is none.

    Raises:
      ValueError: the words name none.
    """
    match words:
        case [] | ["none"]:
            return None
        case [("atari" | "mujoco") as name]:
            return Normalisation(*_TABLES[name])
        case [str(path)] if path.endswith(".json"):
            return _from_file(Path(path))
        case [low, high]:
            text = f"normalised: {low} becomes 0, {high} becomes 1"
            return Normalisation(text, {}, _range([low, high], "--normalise"))
    raise ValueError(f"--normalise: got {' '.join(words)}. {_WAY_OUT}.")


def _from_file(path: Path) -> Normalisation:
    try:
        ranges = files.read_json(path)
        found = {
            simple_name(name): _range(ends, f"{path}: {name}") for name, ends in ranges.items()
        }
    except (OSError, json.JSONDecodeError, UnicodeDecodeError, AttributeError) as error:
        raise ValueError(f"--normalise: {path} cannot be read: {error}. {_WAY_OUT}.") from error
    return Normalisation(f"normalised with the returns in {path.name}", found)


def _range(ends: Sequence[str | float], where: str) -> Range:
    try:
        low, high = map(float, ends)
    except (TypeError, ValueError):
        low = high = np.nan
    if not (np.isfinite([low, high]).all() and low < high):
        shown = " ".join(map(str, ends)) if isinstance(ends, list) else ends
        raise ValueError(f"{where}: MIN and MAX must be two numbers, MIN the lower; got {shown}.")
    return low, high


def simple_name(environment: str) -> str:
    """Returns a name without module, version, suite and signs: ALE/Ms_Pacman-v5 is mspacman."""
    name = re.sub(r"^.*[/:]|(NoFrameskip|Deterministic)?-v\d+$", "", environment)
    return re.sub(r"[^a-z0-9]", "", name.lower())
