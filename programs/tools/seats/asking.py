"""Asks a person in the terminal for the choices of an agent."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
from dm_env import specs
from rich.console import Console
from rich.text import Text

from rlstack.programs.build.policies.policy import Prediction
from rlstack.programs.pictures.labels import ACTION, Labels, is_discrete
from rlstack.specs import ACTION_MASK
from rlstack.types import PyTree

_MAX_LISTED = 12  # choices listed with their probabilities, the most likely first


class Quit(Exception):  # noqa: N818  (a request, not an error)
    """The person asked to quit."""


class Asker:
    """Asks a person for discrete actions, and tells which actions are legal.

    Attributes:
      console: receives the output.
      labels: names the choices.
    """

    def __init__(
        self, console: Console, labels: Labels, action_spec: PyTree, follows: bool = False
    ) -> None:
        """Checks that the actions are discrete.

        Args:
          console: receives the output.
          labels: names the choices.
          action_spec: the spec of one action: an array, or a dict of arrays.
          follows: True to let an empty line play the choice of an agent.

        Raises:
          ValueError: the actions are no discrete choices.
        """
        self.console, self.labels, self._follows = console, labels, follows
        named = action_spec if isinstance(action_spec, Mapping) else {ACTION: action_spec}
        self._is_named = isinstance(action_spec, Mapping)
        self._specs: dict[str, specs.BoundedArray] = {}
        for name, spec in named.items():
            if not is_discrete(spec):
                raise ValueError(
                    f"play: actions must be discrete choices to be played by hand; got {spec}."
                )
            self._specs[name] = spec

    def legal(self, observation: PyTree) -> dict[str, list[np.ndarray]]:
        """Returns which choices are legal: by action type, for each chooser, bool ``[choices]``."""
        found = {}
        for name, spec in self._specs.items():
            mask = observation.get(ACTION_MASK) if isinstance(observation, Mapping) else None
            mask = mask[name] if isinstance(mask, Mapping) else mask
            rows = int(np.prod(spec.shape))
            if mask is not None:
                found[name] = list(np.asarray(mask).reshape((rows, -1)) > 0)
                continue
            sizes = np.broadcast_to(spec.maximum - spec.minimum + 1, spec.shape).ravel().tolist()
            found[name] = [np.ones(int(size), bool) for size in sizes]
        return found

    def first_legal(self, observation: PyTree) -> PyTree:
        """Returns the action of first legal choices."""
        legal = self.legal(observation)
        return self._action({name: [int(r.argmax()) for r in rows] for name, rows in legal.items()})

    def has_choice(self, observation: PyTree) -> bool:
        """Returns whether any chooser has more than one legal choice."""
        legal = self.legal(observation)
        rows = {name: len(masks) for name, masks in legal.items()}
        choosers = self.labels.choosers(observation, rows)
        return any(legal[one.action_type][one.row].sum() > 1 for one in choosers)

    def told(self, observation: PyTree, action: PyTree) -> str:
        """Returns an action in words."""
        leaves = {name: np.ravel(leaf) for name, leaf in self._named(action).items()}
        found = []
        for one in self.labels.choosers(observation, {k: len(v) for k, v in leaves.items()}):
            name, row = one.action_type, one.row
            label = self.labels.choice(name, int(leaves[name][row]) - one.least, row)
            found.append(f"{one.title}: {label}" if one.title else label)
        return ", ".join(found)

    def ask(
        self, observation: PyTree, prediction: Prediction | None = None, who: str = ""
    ) -> PyTree:
        """Asks for the choice of every chooser; returns the action.

        Args:
          observation: the observation, which determines the legal actions.
          prediction: an agent's action and estimates to show, if any.
          who: text that begins each question.

        Raises:
          Quit: the person asked to quit.
          EOFError: the input has ended.
        """
        legal = self.legal(observation)
        chosen = {name: [0] * len(rows) for name, rows in legal.items()}
        agents = None if prediction is None else self._named(prediction.action)
        follows = False
        for one in self.labels.choosers(observation, {k: len(v) for k, v in legal.items()}):
            name, row = one.action_type, one.row
            predicted = None if agents is None else int(np.ravel(agents[name])[row]) - one.least
            if not follows:
                options = {
                    int(i): self.labels.choice(name, int(i), row)
                    for i in np.flatnonzero(legal[name][row])
                }
                chances = None if prediction is None else prediction.probabilities.get(name)
                self._list(" ".join(filter(None, (who, one.title))), options, predicted,
                           None if chances is None else chances[row])  # fmt: skip
                every = [self.labels.choice(name, i, row) for i in range(len(legal[name][row]))]
                choice = self._choose(options, every)
                follows = choice is None
            if follows:
                assert predicted is not None
                choice = predicted
            assert choice is not None
            chosen[name][row] = choice
        return self._action(chosen)

    def read(self, hint: str) -> str:
        """Reads a line, in lower case.

        Raises:
          Quit: the person asked to quit.
          EOFError: the input has ended.
        """
        text = self.console.input(Text(hint)).strip().lower()
        if text == "q":
            raise Quit
        return text

    def _named(self, action: PyTree) -> Mapping[str, PyTree]:
        return action if self._is_named else {ACTION: action}

    def _action(self, choices: Mapping[str, list[int]]) -> PyTree:
        """Returns choices, which count from 0, in the structure of the action spec."""
        arrays = {
            name: np.array(rows, spec.dtype).reshape(spec.shape) + spec.minimum
            for name, rows in choices.items()
            for spec in [self._specs[name]]
        }
        return arrays if self._is_named else arrays[ACTION]

    def _list(
        self, title: str, options: dict[int, str], predicted: int | None, chances: np.ndarray | None
    ) -> None:
        order = list(options)
        if chances is not None:
            order.sort(key=lambda i: -chances[i])
        parts = []
        for i in order[:_MAX_LISTED]:
            chance = "" if chances is None else f" {chances[i]:.1%}"
            parts.append(f"{_text(i, options[i])}{chance}{' *' if i == predicted else ''}")
        rest = len(order) - _MAX_LISTED
        self.console.print(Text(f"{title}: {', '.join(parts)}"), end="")
        self.console.print(f", and {rest} more" if rest > 0 else "")

    def _choose(self, options: dict[int, str], every: list[str]) -> int | None:
        """Reads a legal choice; an empty line returns None, if it plays the agent's choice.

        Args:
          options: the labels of the legal choices.
          every: the labels of all choices.
        """
        labels = {label.lower(): i for i, label in options.items()}
        hint = "number or label, Enter for the agent's: " if self._follows else "number or label: "
        while True:
            text = self.read(hint)
            if not text and self._follows:
                return None
            if text in labels:
                return labels[text]
            # Where the labels are numbers, they need not count from 0.
            counts = text.isdecimal() and not any(map(_is_number, every))
            if counts and int(text) in options:
                return int(text)
            legal = ", ".join(_text(i, label) for i, label in options.items())
            exists = text in map(str.lower, every) or (counts and int(text) < len(every))
            what = "not legal here" if exists else "not a choice"
            self.console.print(Text(f"{text!r} is {what}; choose from {legal}, or q to quit."))


def _text(number: int, label: str) -> str:
    return label if _is_number(label) else f"{number} {label}"


def _is_number(label: str) -> bool:
    return label.removeprefix("-").isdecimal()
