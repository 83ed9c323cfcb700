"""`rlstack completion SHELL`: a script that completes commands, presets and options in a shell."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Literal

from tyro.conf import Positional

from rlstack.programs.cli import component_options
from rlstack.programs.cli.options import parse
from rlstack.programs.config import options
from rlstack.programs.config.experiment import Experiment, agents_of
from rlstack.programs.config.presets import PRESETS, preset
from rlstack.programs.tools.cluster.options import KINDS

# zsh and bash have the same function: zsh's bashcompinit runs functions for bash.
_SCRIPT = """\
_rlstack() {{
  local word=${{COMP_WORDS[COMP_CWORD]}} command=${{COMP_WORDS[1]}} preset=${{COMP_WORDS[2]}}
  local names=""
  if [ "$COMP_CWORD" -eq 1 ]; then
    names="{commands}"
  elif [ "$command" = cluster ] && [ "$COMP_CWORD" -le 3 ]; then
    [ "$COMP_CWORD" -eq 2 ] && names="{kinds}" || names="{presets}"
  elif [[ $command = train || $command = sweep ]] && [ "$COMP_CWORD" -eq 2 ]; then
    names="{presets} --resume"
  elif [ "$command" = train ]; then
    names="{options}"
    case "$preset" in
{cases}
    esac
  fi
  COMPREPLY=($(compgen -W "$names" -- "$word"))
  if [ "$COMP_CWORD" -gt 1 ] && [ ${{#COMPREPLY[@]}} -eq 0 ]; then
    COMPREPLY=($(compgen -f -- "$word"))
  fi
}}
complete -o filenames -F _rlstack rlstack
"""
_ZSH = "autoload -U +X bashcompinit && bashcompinit\n"


@dataclasses.dataclass(frozen=True)
class CompletionOptions:
    """Print a script that completes commands, presets and options of rlstack in a shell.

    For bash: eval "$(rlstack completion bash)", in ~/.bashrc. For zsh likewise, in ~/.zshrc.
    """

    shell: Positional[Literal["bash", "zsh"]]
    """The shell that reads the script."""


def main(args: Sequence[str]) -> int:
    """Prints the script; returns the exit code."""
    from rlstack.programs.cli import commands, train

    chosen = parse(CompletionOptions, "rlstack completion", args)
    names = [*commands.COMMANDS, *commands.WITHOUT_JAX]
    print(script(chosen.shell, names, train.option_names()), end="")
    return 0


def script(shell: str, commands: Sequence[str], train_options: Sequence[str]) -> str:
    """Returns the script for "bash" or "zsh"; for the other arguments see `main`."""
    names = {name: option_names(preset(name)) for name in PRESETS}
    common = set.intersection(*map(set, names.values()))
    own: dict[tuple[str, ...], list[str]] = {}  # presets by the options that only some have
    for name, every in names.items():
        own.setdefault(tuple(option for option in every if option not in common), []).append(name)
    cases = "\n".join(
        f'      {"|".join(presets)}) names="$names {" ".join(some)}" ;;'
        for some, presets in own.items()
    )
    text = _SCRIPT.format(
        commands=" ".join(commands),
        kinds=" ".join(KINDS),
        presets=" ".join(PRESETS),
        options=" ".join(sorted({*common, *train_options})),
        cases=cases,
    )
    return _ZSH + text if shell == "zsh" else text


def option_names(experiment: Experiment) -> list[str]:
    """Returns the names of the options that change an experiment, as the parser makes them."""
    filled = component_options.fill_all(experiment)
    with agents_of(experiment):
        return [f"--{entry.name}" for entry in options.entries(filled)]
