"""`rlstack report --paper`: numbers worked by hand, the protocol, and LaTeX's characters."""

import json
import re
import shutil
import subprocess
import sys

import pytest

from rlstack.programs.cli.commands import main
from rlstack.programs.session import result
from tests.programs.tools.report.made_runs import make_run, make_runs

SPECIAL = {"&", "%", "$", "#", "_", "{", "}", "~", "^", "\\"}


def paper(tmp_path, *words):
    """Writes the files next to a page; returns both texts."""
    page = tmp_path / "out" / "page.html"
    assert main("report", [*map(str, words), "--html", str(page), "--paper"]) == 0
    return [(tmp_path / "out" / "page" / f"paper.{kind}").read_text() for kind in ("md", "tex")]


def test_numbers_by_hand_are_in_the_table_and_the_curve(tmp_path, capsys):
    # Mean of 10, 20, 30, 40, 100: 40. IQM: a quarter of 5, rounded down, is left out at each end,
    # so (20 + 30 + 40) / 3 = 30. Curves rise linearly to the score at 1,000 frames: at 100 frames
    # they have a tenth, and so has their IQM.
    make_runs(tmp_path / "runs", [10.0, 20.0, 30.0, 40.0, 100.0])
    markdown, latex = paper(tmp_path, tmp_path / "runs")
    row = r"\| cartpole-ppo \| CartPole-v1 \| 5 \| 40\.0 \[.*\] \| 30\.0 \[.*\] \| 30\.0 \[.*\] \|"
    assert re.search(row, markdown)
    assert re.search(r"cartpole-ppo & CartPole-v1 & 5 & 40\.0 \[[^&]*& 30\.0 \[", latex)
    assert re.search(r"\| cartpole-ppo \| 100 \| 3\.0 \[", markdown)
    assert re.search(r"\| cartpole-ppo \| 1,000 \| 30\.0 \[", markdown)
    line = next(x for x in latex.splitlines() if "mark repeat" in x)
    points = [tuple(map(float, p.split(","))) for p in re.findall(r"\(([^()]*)\)", line)]
    assert points[0] == (100, 3) and points[-1] == (1000, 30)
    assert all(y == pytest.approx(x * 0.03, rel=1e-4) for x, y in points)
    out = capsys.readouterr().out
    assert "paper.md: cartpole-ppo" in out and "paper.tex: cartpole-ppo" in out


def test_the_protocol_says_what_was_done(tmp_path):
    for folder, scores, frames in (("a", [1.0, 2.0, 3.0], 2000), ("b", [4.0, 5.0], 20_000)):
        make_runs(tmp_path / folder, scores, frames=frames)
    for path in (tmp_path / "a").iterdir():
        about = json.loads((path / "result.json").read_text())
        about |= {"versions": {"python": "3.13.1", "jax": "0.9"}, "machine": "Linux, 100% CPU"}
        (path / "result.json").write_text(json.dumps(about))
    (make_run(tmp_path / "b" / "seed=9", 6.0, seed=9) / "result.json").unlink()
    markdown, latex = paper(tmp_path, tmp_path / "a", tmp_path / "b", "--compare")
    text = markdown.split("## Protocol")[1]
    assert "Seeds: a on CartPole-v1: 1, 2, 3; b on CartPole-v1: 1, 2." in text
    assert "Frames: a on CartPole-v1: 2,000; b on CartPole-v1: 20,000." in text
    assert "Episodes: 10 of at most 30,000 steps (all)." in text
    assert "95% intervals" in text and "10,000 samples" in text
    assert "**Versions.** Commit of rlstack: abcdef0. Packages: python 3.13.1, jax 0.9." in text
    assert "**Machine.** Linux, 100% CPU. Median duration of a run: 1 s." in text
    assert "**Limits.** 1 run has no result" in text
    assert "**Limits.** The budgets on CartPole-v1 differ" in text
    assert "a on CartPole-v1: 3; b on CartPole-v1: 2." in text  # fewer than five runs
    for sentence in re.findall(r"^\*\*(\w+)\.\*\* (.*)$", text, re.M):
        shown = sentence[1].replace("%", r"\%")
        assert f"\\paragraph{{{sentence[0]}.}} {shown}" in latex


def test_the_protocol_names_random_actions_and_an_evaluator_of_ones_own(tmp_path):
    path = make_run(tmp_path / "run", 3.0)
    config = json.loads((path / "config.json").read_text())
    config["evaluator"] |= {"epsilon": 0.05, "factory": "json:dumps", "max_steps": 500}
    (path / "config.json").write_text(json.dumps(config))
    markdown, _ = paper(tmp_path, path)
    text = "with random actions with probability 0.05, by the evaluator json:dumps."
    assert f"Episodes: 10 of at most 500 steps, {text}" in markdown


def test_runs_of_earlier_versions_have_no_machine(tmp_path):
    markdown, _ = paper(tmp_path, *make_runs(tmp_path / "runs", [1.0, 2.0]))
    assert "Packages: not recorded (runs of an earlier version)." in markdown
    assert "The machine was not recorded (runs of an earlier version)." in markdown


def test_names_cannot_break_the_latex(tmp_path):
    make_runs(tmp_path / "b_%$#{}~^\\&", [1.0, 2.0])
    make_runs(tmp_path / "plain", [1.0, 2.0])
    _, latex = paper(tmp_path, tmp_path / "b_%$#{}~^\\&", tmp_path / "plain", "--by", "directory")
    name = r"b\_\%\$\#\{\}\textasciitilde{}\textasciicircum{}\textbackslash{}\&"
    assert f"\\addlegendentry{{{name}}}" in latex and f"\n{name} & CartPole-v1 & 2 &" in latex
    left = latex.replace(name, "")
    assert "b_" not in left
    for kind in ("table", "tabular", "figure", "axis", "tikzpicture"):
        assert latex.count(f"\\begin{{{kind}}}") == latex.count(f"\\end{{{kind}}}") > 0
    plain = re.sub(r"\\[a-zA-Z]+|\\.", "", latex)  # without commands and escapes
    assert plain.count("{") == plain.count("}")
    body = "\n".join(line for line in plain.splitlines() if not line.startswith("%"))
    assert not set(body.replace("{%\n", "")) & (SPECIAL - {"{", "}", "&"})  # of \resizebox


NAMES = ["[x] <a> | --two", "*star"]


def test_signs_and_starts_of_rows_mean_themselves(tmp_path):
    make_runs(tmp_path / NAMES[0], [-1.5, 2.0])
    make_runs(tmp_path / NAMES[1], [1.0, 2.0])
    _, latex = paper(tmp_path, *(tmp_path / name for name in NAMES), "--by", "directory")
    shown = r"[x] \textless{}a\textgreater{} \textbar{} -{}-two"
    # A bracket or a star behind the end of a row would be an argument of it.
    assert f"\n{{}}{shown} & CartPole-v1 & 2 & 0.250 [$-$1.500, 2.000]" in latex
    assert "\n{}*star & CartPole-v1 & 2 & 1.500" in latex
    assert f"\\addlegendentry{{{shown}}}" in latex


@pytest.mark.skipif(shutil.which("pdflatex") is None, reason="there is no LaTeX")
def test_latex_compiles_it_without_an_error_or_what_is_too_wide(tmp_path):
    names = [*NAMES, "b_%$#{}~^\\&", "a-name-of-many-words"]
    for number, name in enumerate(names):
        make_runs(tmp_path / name, [1.0 + number, -2.0, 4.0])
    words = [tmp_path / name for name in names]
    _, latex = paper(tmp_path, *words, "--by", "directory", "--compare")
    preamble = latex.splitlines()[1].removeprefix("% ")
    document = f"\\documentclass{{article}}\n{preamble}\n\\begin{{document}}\n{latex}"
    (tmp_path / "main.tex").write_text(f"{document}\n\\end{{document}}\n")
    done = subprocess.run(
        ["pdflatex", "-interaction=nonstopmode", "main.tex"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 0, done.stdout
    wider = [float(points) for points in re.findall(r"Overfull \\hbox \(([\d.]+)pt", done.stdout)]
    assert max(wider, default=0.0) < 20, done.stdout  # words that cannot be broken
    assert (tmp_path / "main.pdf").stat().st_size > 10_000


def test_a_result_names_versions_and_machine(tmp_path, monkeypatch):
    monkeypatch.delitem(sys.modules, "gymnax", raising=False)
    monkeypatch.setitem(sys.modules, "minigrid", object())  # as if the run had imported it
    found = result.versions()
    assert found["python"].startswith("3.") and re.match(r"\d+\.\d+", found["jax"])
    assert re.match(r"\d+\.", found["minigrid"]) and "gymnax" not in found
    assert re.search(r", \d+ cores?", result.machine())
    monkeypatch.setattr("os.sched_getaffinity", lambda _: {0}, raising=False)
    assert result.machine().endswith(", 1 core") or ", 1 core, " in result.machine()
    about = tmp_path / "cpuinfo"
    about.write_text("processor : 0\nmodel name\t: A: B\nmodel name\t: A: B\n")
    assert result._values(str(about), "model name") == ["A: B", "A: B"]
    assert result._values(str(tmp_path / "none"), "model name") == []
