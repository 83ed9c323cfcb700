"""What a check found: which rules hold, which fail and where, and which do not apply."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Literal, NamedTuple

from rlstack.programs.session.errors import where

Outcome = Literal["holds", "fails", "does not apply"]


class Result(NamedTuple):
    """The outcome of one rule."""

    rule: str
    outcome: Outcome
    text: str = ""  # why it fails, with the place; why it does not apply; or figures


class RuleError(Exception):
    """A rule fails."""

    def __init__(self, text: str, where: str = "") -> None:
        """Takes one sentence, and the place in the user's file as "FILE:LINE"."""
        super().__init__(f"{where}: {text}" if where else text)


class NotApplicableError(Exception):
    """A rule does not apply to this agent or environment; the message says why."""


class Report(NamedTuple):
    """The results of all rules; ``str`` gives a table."""

    subject: str
    results: Sequence[Result]

    @property
    def failures(self) -> list[Result]:
        """The rules that fail."""
        return [result for result in self.results if result.outcome == "fails"]

    def __str__(self) -> str:
        width = max(len(result.rule) for result in self.results)
        lines = [self.subject]
        for result in self.results:
            text = f": {result.text}" if result.text and result.outcome == "holds" else ""
            lines.append(f"  {result.rule:{width}}  {result.outcome}{text}")
            if result.text and result.outcome != "holds":
                lines.append(f"    {result.text}")
        held = sum(result.outcome == "holds" for result in self.results)
        lines.append(f"{held} of {len(self.results)} rules hold, {len(self.failures)} fail.")
        return "\n".join(lines)

    def raise_failures(self) -> None:
        """Checks that no rule fails, for a test of your own.

        Raises:
          AssertionError: a rule fails; the message is the table.
        """
        if self.failures:
            raise AssertionError(str(self))


def run_rules(
    subject: str, rules: Sequence[tuple[str, Callable[[Any], str | None]]], argument: Any
) -> Report:
    """Calls each rule with the argument, and reports what each one found.

    A rule raises `RuleError` or `NotApplicableError`; it holds if it returns, perhaps with figures.
    """
    return Report(subject, [_result(name, rule, argument) for name, rule in rules])


def _result(name: str, rule: Callable[[Any], str | None], argument: Any) -> Result:
    try:
        return Result(name, "holds", rule(argument) or "")
    except NotApplicableError as reason:
        return Result(name, "does not apply", str(reason))
    except RuleError as failure:
        return Result(name, "fails", str(failure))
    except Exception as error:  # whatever the user's code raises
        text = f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"
        return Result(name, "fails", f"{text}{where(error)}")
