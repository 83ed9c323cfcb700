"""`rlstack play RUN_DIR --seat SEAT`: a person in one seat of a game, policies in the others."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Sequence

from rich.columns import Columns
from rich.console import Console
from rich.panel import Panel
from rich.text import Text

from rlstack.programs.build.policies.policy import Policy, Prediction
from rlstack.programs.build.restored import Which
from rlstack.programs.build.seeds import role_seed
from rlstack.programs.pictures.screen import picture_as_text
from rlstack.programs.pictures.stage import Stage
from rlstack.programs.pictures.watch import MAX_STEPS
from rlstack.programs.tools.play import entity_tables
from rlstack.programs.tools.seats.asking import Asker, Quit
from rlstack.programs.tools.seats.match import (
    Game,
    Moment,
    Player,
    PolicyPlayer,
    play_game,
    seen_by,
)
from rlstack.programs.tools.seats.results import Episode
from rlstack.programs.tools.seats.sides import Side, find, sides_of
from rlstack.types import PyTree


def play(
    run: str | os.PathLike[str],
    seat: str,
    *,
    params: Which = "last",
    greedy: bool = True,
    agent: bool = False,
    seed: int | None = None,
    console: Console | None = None,
) -> list[Game]:
    """Lets a person play until they quit with ``q`` or the input ends.

    The person is asked only where their seat has more than one legal action. The other seats are
    played as by `rlstack.programs.tools.seats.watch.watch`.

    Args:
      run: the directory of a run, or of a checkpoint; that of a run with several policies may be
        followed by ``:NAME`` of the policy that plays all other seats.
      seat: the person's seat, by name or number.
      params: "last" for the newest params, "best" for those with the best return in an evaluation.
      greedy: True if policies take their best action; False to explore as at the end of training.
      agent: True to show the probabilities and the value of the agent that would play the person's
        seat, and to let an empty line play this agent's choice.
      seed: seed of the game and of random actions; by default the seed of the run.
      console: receives the output; standard output by default.

    Returns:
      The games that were finished.

    Raises:
      ValueError: there is no such run or seat, or the actions are no discrete choices.
    """
    console = console or Console(highlight=False)
    entry = find("play", run, params)
    seed = entry.experiment.seed if seed is None else seed
    with contextlib.closing(Stage(entry.experiment, role_seed(seed, "watch"))) as stage:
        own = seat_number(seat, stage.seats, entry.experiment.env.name)
        asker = Asker(console, stage.labels_of(own), stage.spec.action, agent)
        (side,) = sides_of([entry], stage.spec, len(stage.seats), greedy=greedy, seed=seed)
        table = _Table(stage, own, side, asker, agent)
        games: list[Game] = []
        try:
            while True:
                games.append(table.game())
                asker.read("Enter for another, q to quit: ")
        except (Quit, EOFError):
            console.print()
        return games


def seat_number(seat: str, names: Sequence[str], env: str) -> int:
    """Returns the number of the seat that a text names.

    Raises:
      ValueError: there is no such seat, or several have this name.
    """
    if len(names) < 2:
        raise ValueError(
            f"play: --seat needs a run of a game of several seats; {env} has one agent. "
            "rlstack play GAME plays an entity environment by hand."
        )
    numbers = [number for number, name in enumerate(names) if seat in (name, str(number))]
    if len(numbers) != 1:
        listed = ", ".join(
            name if name == str(number) else f"{number} {name}" for number, name in enumerate(names)
        )
        raise ValueError(
            f"play: --seat must be one of the seats, by name or number: {listed}; got {seat!r}."
        )
    return numbers[0]


class _Table:
    """A game, the policies that play in it, and the person."""

    def __init__(self, stage: Stage, own: int, side: Side, asker: Asker, agent: bool) -> None:
        self._stage, self._own, self._asker = stage, own, asker
        self._names = [
            f"{name} ({'you' if seat == own else side.name})"
            for seat, name in enumerate(stage.titles)
        ]
        hint = side.policies[own] if agent else None
        self._person = _Person(stage, own, self._names[own], asker, hint)
        self._players: list[Player] = [
            self._person if seat == own else PolicyPlayer(policy)
            for seat, policy in enumerate(side.policies)
        ]
        self._told: list[Asker] = [  # name the choices of each seat
            Asker(asker.console, stage.labels_of(seat), stage.spec.action)
            for seat in range(len(stage.seats))
        ]

    def game(self) -> Game:
        """Plays a game; `Quit` or EOFError ends it."""
        game = play_game(self._stage, self._players, MAX_STEPS, self._tell)
        returns = [
            f"{name} {total:.6g}" for name, total in zip(self._names, game.returns, strict=True)
        ]
        ended = "cut" if game.cut else "over"
        self._asker.console.print(
            Text(
                f"The game is {ended} after {game.length} steps: {', '.join(returns)}"
                f"{self._verdict(game)}.",
                "bold",
            )
        )
        return game

    def _verdict(self, game: Game) -> str:
        if game.cut:
            return ""
        winners = Episode(tuple(range(len(game.returns))), game).winners()  # each seat for itself
        if self._own not in winners:
            return "; you lose"
        return "; you win" if winners == [self._own] else "; a draw"

    def _tell(self, moment: Moment) -> None:
        """Tells what the other seats do, once the person has decided too."""
        if moment.is_last:
            self._person.show(seen_by(moment.timestep, self._own))
            return
        for seat, choice in enumerate(moment.choices):
            observation = seen_by(moment.timestep, seat)
            if seat == self._own or choice is None or not self._told[seat].has_choice(observation):
                continue
            move = self._told[seat].told(observation, choice.action)
            self._asker.console.print(Text(f"{self._names[seat]}: {move}"))


class _Person:
    """The person, as a player."""

    sees_waits = False

    def __init__(
        self, stage: Stage, seat: int, name: str, asker: Asker, hint: Policy | None
    ) -> None:
        self._stage, self._seat, self._name = stage, seat, name
        self._asker, self._hint = asker, hint

    def begin(self) -> None:
        """Resets the agent whose choices are shown."""
        if self._hint is not None:
            self._hint.reset()

    def predict(self, observation: PyTree, reward: float) -> Prediction:
        """Asks for the action, if there is more than one; `Quit` or EOFError ends the game."""
        prediction = None if self._hint is None else self._hint.predict(observation, reward)
        if not self._asker.has_choice(observation):
            return _only(self._asker.first_legal(observation))
        self.show(observation)
        if prediction is not None and prediction.value is not None:
            self._asker.console.print(f"the agent's value: {prediction.value:.3f}")
        return _only(self._asker.ask(observation, prediction, self._name))

    def show(self, observation: PyTree) -> None:
        """Shows the game as this seat sees it."""
        panel = Panel(
            picture_as_text(self._stage.picture_of(observation, self._seat)), expand=False
        )
        env = self._stage.entity_env(self._seat)
        tables = [] if env is None else entity_tables(env, observation)
        self._asker.console.print(Columns([panel, *tables]))


def _only(action: PyTree) -> Prediction:
    """Returns a prediction with an action only, without probabilities and values."""
    return Prediction(action, {}, {}, None)
