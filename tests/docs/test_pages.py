"""Every page is correct: each block runs as written, and everything that it names exists."""

import ast
import dataclasses
import inspect
import re

import pytest

from rlstack import stateful_params
from rlstack.agent import EpochAgent
from rlstack.checks import hints_of_class
from rlstack.programs.__main__ import USAGE
from rlstack.programs.cli import (
    early_options,
    finished,
    presets,
    serve,
    status,
    sweep,
    train,
)
from rlstack.programs.cli.options import UsageError
from rlstack.programs.config.experiment import Experiment
from rlstack.programs.config.presets import PRESETS
from tests.docs.pages import BLOCKS, PAGES, ROOT, blocks, code_spans, commands, section, text_of

ALL_SECONDS = 900  # for the blocks of one page
RUNNABLE = [block for block in BLOCKS if block.runs]
OUTPUTS = [block for block in BLOCKS if block.is_output]


def runs_blocks(test):
    """Marks a test that runs a page's blocks."""
    mark = pytest.mark
    for decorate in (mark.slow, mark.chosen, mark.timeout(ALL_SECONDS)):
        test = decorate(test)
    return test


def stdout_of(ran, page, part):
    """The output of the first block of a page that contains this text."""
    _, outputs = ran(page)
    return next(outputs[block.line][1] for block in blocks(page) if part in block.text)


@runs_blocks
@pytest.mark.parametrize("block", RUNNABLE, ids=str)
def test_the_block_runs_as_written(ran, block):
    code, stdout, stderr = ran(block.page)[1][block.line]
    assert code is not None, f"{block} takes too long:\n{stderr[-3000:]}"
    assert code == 0, f"{block}:\n{stdout}\n{stderr[-3000:]}"


@runs_blocks
@pytest.mark.parametrize("block", OUTPUTS, ids=str)
def test_the_shown_output_is_what_comes_but_for_the_numbers(ran, block):
    number = r"\d[\d,]*(?:\.\d+)?"
    pattern = number.join(re.escape(part) for part in re.split(number, block.text.strip()))
    _, outputs = ran(block.page)
    before = max(line for line in outputs if line < block.line)
    assert re.search(pattern, outputs[before][1]), f"no {pattern!r} in:\n{outputs[before][1]}"


def test_pages_have_blocks_that_run():
    assert len(PAGES) > 15
    assert len(RUNNABLE) > 25
    assert len({block.page for block in RUNNABLE}) > 8
    assert len(OUTPUTS) >= 2
    programs = [block for block in RUNNABLE if block.language == "python"]
    assert [str(b) for b in programs if not re.match(r"# \w+\.py\n", b.text)] == []


@runs_blocks
def test_a_run_leaves_what_the_table_says(ran):
    page = "docs/tutorials/first_run.md"
    folder, _ = ran(page)
    rows = dict(re.findall(r"^\| `([^`]+)` \| (.*) \|$", section(page, "What a run leaves"), re.M))
    assert len(rows) >= 5
    for name in rows:
        assert (folder / "runs" / "first" / name).exists(), name
    result = (folder / "runs" / "first" / "result.json").read_text()
    stated = re.findall(r"`(\w+)`", rows["result.json"])
    assert stated
    assert all(f'"{field}"' in result for field in stated)
    assert '"eval_episodes": 10' in stdout_of(ran, page, "rlstack eval")


@runs_blocks
def test_a_failed_update_can_be_repeated(ran):
    page = "docs/tutorials/debugging.md"
    printed = stdout_of(ran, page, "reward-scale inf")
    assert "exit code 1" in printed
    assert re.search(r"^loss +(nan|-?inf)$", printed, re.M)
    run_dir = ran(page)[0] / "runs" / "nan"
    assert (run_dir / "dump-1").exists()
    assert not (run_dir / "result.json").exists()


@runs_blocks
def test_the_examples_do_what_the_text_says(ran):
    for page in ("README.md", "docs/tutorials/own_agent.md"):
        learned = float(stdout_of(ran, page, "class ActorCritic"))
        assert learned > 150, f"{page}: the agent learns nothing"
    environment = "docs/tutorials/own_environment.md"
    learned = re.search(
        r"evaluation return (\S+)", stdout_of(ran, environment, "--env.name my_env:Corridor")
    )
    assert float(learned[1]) == 1.0
    folder, _ = ran("docs/tutorials/own_network.md")
    assert '"network_factory": "my_net:make"' in (folder / "runs/net/config.json").read_text()


def test_the_first_two_commands_are_train_and_test():
    first = [command for block in blocks("README.md") for command in commands(block.text)][:2]
    assert first == ["make train", "make test"]


def test_every_make_target_exists():
    targets = set(re.findall(r"^([\w-]+):", text_of("Makefile"), re.M))
    words = [c for b in BLOCKS if b.is_make for c in commands(b.text)]
    words += [span for page in [*PAGES, "BUILD_NOTES.md"] for span in code_spans(page)]
    named = set(re.findall(r"^make ([a-z-]+)", "\n".join(words), re.M))
    assert {"train", "test", "docs", "coverage"} <= named <= targets


def test_every_command_and_preset_exists():
    known = set(re.findall(r"^  (\w+) ", USAGE, re.M))
    words = [span for page in PAGES for span in code_spans(page)]
    words += [block.text for block in BLOCKS if block.language == "sh"]
    named = set(re.findall(r"(?<!from )\brlstack ([a-z]+)\b", "\n".join(words)))
    assert named == known
    trained = re.findall(r"\brlstack train ([a-z][\w-]*)(?![\w/-])(.*)", "\n".join(words))
    # The module of a page's own preset is named by --module; the page's test runs the command.
    assert {name for name, options in trained if "--module" not in options} <= set(PRESETS)


def options_of(kind, prefix="--"):
    """The names of the options of a command with this dataclass."""
    for name, hint in hints_of_class(kind).items():
        option = prefix + name.replace("_", "-")
        inner = dataclasses.is_dataclass(hint) and hint is not Experiment
        yield from options_of(hint, f"{option}.") if inner else [option]


def test_every_option_in_a_block_exists():
    kinds = {name: getattr(finished, f"_{name.title()}Options") for name in
             ("eval", "diff", "report", "record", "play", "watch", "export", "rerun")}  # fmt: skip
    kinds |= {"presets": presets._PresetsOptions, "serve": serve._ServeOptions}
    kinds |= {"top": status._TopOptions, "dashboard": status._DashboardOptions}
    seen = set()
    lines = [line for block in BLOCKS if block.language == "sh" for line in commands(block.text)]
    for line in lines:
        for command, rest in re.findall(r"\brlstack (\w+) ([^|;&#>]*)", line):
            words = rest.split()
            given = {word.partition("=")[0] for word in words if word.startswith("--")} - {
                *("--module", "--vary", "--space", "--help", "--help-all", "--logger"),
            }
            seen |= {(command, option) for option in given}
            study = {"train": train, "sweep": sweep}.get(command)
            if study is not None and "--resume" in given:
                assert given <= set(options_of(study._ResumeOptions)), line
            elif study is not None and words[0] in PRESETS:
                kind = study._TrainOptions if study is train else study._SweepOptions
                short = train._SHORT_OPTIONS
                full = [short.get(option, option) for option in sorted(given)]
                try:
                    early_options.check("rlstack", words[0], full, kind)
                except UsageError as error:  # these have no values
                    assert "there is no option" not in str(error), line
            elif command in kinds:
                assert given <= set(options_of(kinds[command])), line
    assert len(seen) > 80


def test_every_path_in_the_architecture_exists():
    cells = re.findall(r"^\| (`[^|]+) \|", text_of("docs/architecture.md"), re.M)
    paths = [path for cell in cells for path in re.findall(r"`([^`]+)`", cell)]
    assert len(paths) > 15
    assert [path for path in paths if not (ROOT / path).exists()] == []


def test_every_path_in_the_text_exists():
    paths = {
        (page, path)
        for page in (*PAGES, "BUILD_NOTES.md")
        for span in code_spans(page)
        for path in re.findall(
            r"^((?:rlstack|agents|programs|tests|docs|benchmarks|clients|examples)/[\w./-]*)$", span
        )
        if "NAME" not in path and "my_" not in path
    }
    assert len(paths) > 40
    assert {(page, path) for page, path in paths if not (ROOT / path).exists()} == set()


def test_what_the_life_of_a_step_names_is_in_a_file_that_it_names():
    spans = code_spans("docs/life_of_a_step.md")
    trees = [ast.parse((ROOT / span).read_text()) for span in spans if span.endswith(".py")]
    kinds = (ast.ClassDef, ast.FunctionDef)
    known = {node.name for tree in trees for node in tree.body if isinstance(node, kinds)}
    for node in (node for tree in trees for node in tree.body if isinstance(node, ast.ClassDef)):
        known |= {f"{node.name}.{x.name}" for x in node.body if isinstance(x, ast.FunctionDef)}
    named = {span for span in spans if re.fullmatch(r"[A-Z]\w*[a-z]\w*(\.\w+)?", span)}
    assert len(named) > 40
    assert named <= known


def test_the_contract_has_the_signatures_of_the_code():
    stated = dict(re.findall(r"`(\w+)\(([^`)]*)\)`", text_of("docs/agent_contract.md")))
    del stated["LearnerOutput"]
    assert len(stated) >= 12
    for name, arguments in stated.items():
        function = getattr(stateful_params, name, None) or getattr(EpochAgent, name)
        parameters = [p for p in inspect.signature(function).parameters if p != "self"]
        assert arguments.split(", ") == parameters, name


def test_no_figure_is_left_open():
    # In two parts, so that a search for open tasks does not find this line.
    for name in (*PAGES, "BUILD_NOTES.md", "CHANGELOG.md"):
        assert [line for line in text_of(name).splitlines() if "TODO" + "-" in line] == [], name


def test_each_fault_has_a_test_that_exists():
    lines = text_of("docs/faults.md").splitlines()
    rows = [line for line in lines if line.count(" | ") == 2]  # what fails, what happens, the test
    rows = [row for row in rows if not row.startswith(("| What fails", "| ---"))]
    assert len(rows) > 50
    for row in rows:
        first = re.findall(r"`([^`]+)`", row.split(" | ")[-1])[0]
        program = first.removeprefix("python -m ").replace(".", "/") + ".py"
        assert (ROOT / (program if first.startswith("python ") else first)).exists(), row
