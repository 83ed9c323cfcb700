"""What `rlstack report` writes: Markdown, an HTML page, CSV, LaTeX and pictures."""

import csv
import json
import re
import shutil
import subprocess
from html.parser import HTMLParser
from pathlib import Path

import numpy as np
import pytest

from rlstack.math import intervals
from rlstack.programs.cli.commands import main
from rlstack.programs.config.presets import preset
from rlstack.programs.study.study import Study
from rlstack.programs.tools import charts
from rlstack.programs.tools.report import plots, tables
from tests.programs.tools.report.made_runs import make_run, make_runs

A, B = [400.0, 450.0, 500.0, 380.0, 420.0], [100.0, 410.0, 300.0, 250.0, 200.0]


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    """Two methods on two tasks, in folders of runs."""
    path = tmp_path_factory.mktemp("runs")
    make_runs(path / "a" / "cartpole", A)
    make_runs(path / "a" / "catch", [50.0, 60.0], name="acrobot-ppo", env="Catch")
    make_runs(path / "b" / "cartpole", B, name="cartpole-dqn")
    make_runs(path / "b" / "catch", [40.0, 55.0], name="acrobot-dqn", env="Catch")
    return path


class Page(HTMLParser):
    """Collects the attributes and the scripts of a page, and the tags that are not closed."""

    def __init__(self, text):
        super().__init__()
        self.open, self.attributes, self.data, self.counts = [], [], [], {}
        self.feed(text)

    def handle_starttag(self, tag, attrs):
        self.attributes += attrs
        self.counts[tag] = self.counts.get(tag, 0) + 1
        if tag not in ("meta", "line", "polygon", "polyline", "rect", "circle"):
            self.open.append(tag)
        self.in_data = tag == "script" and ("type", "application/json") in attrs

    def handle_endtag(self, tag):
        if tag in self.open:
            assert self.open.pop() == tag
        self.in_data = False

    def handle_data(self, data):
        if getattr(self, "in_data", False):
            self.data.append(json.loads(data))


def compare(root, *options):
    return main("report", [str(root / "a"), str(root / "b"), "--compare", *map(str, options)])


def test_two_directories_are_compared_in_every_format(root, tmp_path, capsys):
    files = {name: tmp_path / f"r.{name}" for name in ("md", "html", "csv", "tex")}
    flags = ("--out", "--html", "--csv", "--latex")
    options = [word for pair in zip(flags, files.values(), strict=True) for word in pair]
    assert compare(root, *options, "--pictures", "none", "--normalise", "0", "500") == 0
    probability = intervals.interval(
        intervals.probability_of_improvement, [np.array(A)], [np.array(B)]
    )
    sentence = "a is better than b on CartPole-v1 with probability "
    sentence += f"{probability.estimate:.2f} [{probability.low:.2f}, {probability.high:.2f}]"
    assert sentence in capsys.readouterr().out
    text = {name: path.read_text() for name, path in files.items()}
    assert not [name for name in text if str(tmp_path) in text[name] or str(root) in text[name]]
    for name in ("md", "html", "tex"):
        assert sentence in text[name]
        assert "0 becomes 0, 500 becomes 1" in text[name]
    lines = list(csv.DictReader(text["csv"].splitlines()))
    found = {(x["method"], x["other"], x["task"], x["statistic"]): x for x in lines}
    assert float(found["a", "", "CartPole-v1", "mean"]["estimate"]) == 430
    assert float(found["a", "b", "CartPole-v1", "improvement"]["low"]) == probability.low
    assert float(found["b", "", "all", "optimality gap"]["estimate"]) == pytest.approx(
        1 - (252 + 47.5) / 2 / 500
    )
    assert ("a", "b", "all", "improvement") in found
    assert text["tex"].count(r"\begin{tabular}") == text["tex"].count(r"\end{tabular}") == 2
    assert "![" not in text["md"]


def test_the_page_is_one_file_with_the_data_of_its_plots(root, tmp_path):
    path = tmp_path / "pages" / "page.html"
    assert compare(root, "--html", path, "--normalise", "0", "500") == 0
    assert list(tmp_path.rglob("*.md")) == []
    text = path.read_text()
    page = Page(text)
    assert page.open == []
    assert not {name for name, _ in page.attributes} & {"src", "href"}  # nothing is loaded
    assert "url(" not in text and "@import" not in text
    curves = {data["name"]: [] for data in page.data}
    for data in page.data:
        assert [curve["name"] for curve in data["curves"]] == ["a", "b"]
        curves[data["name"]].append(data["curves"])
    assert len(curves["frames"]) == 3  # each task, and both
    assert len(curves["normalised score"]) == 1
    cartpole = curves["frames"][1][0]
    assert (cartpole["x"][0], cartpole["x"][-1]) == (100, 1000)
    assert cartpole["estimate"][-1] == pytest.approx(float(intervals.interquartile_mean(A)))
    assert cartpole["low"][-1] < cartpole["estimate"][-1] < cartpole["high"][-1]
    assert page.counts["svg"] == 4 + 1 + 1 + 3  # statistics, improvement, profile, curves
    assert page.counts["polyline"] == sum(len(data["curves"]) for data in page.data)


def test_names_cannot_break_the_page(tmp_path):
    make_runs(tmp_path / "</script><b>&", [1.0, 2.0])
    make_runs(tmp_path / "b_%$#{}~^\\", [1.0, 2.0])
    make_runs(tmp_path / "<!--<script>", [1.0, 2.0])
    folders = [str(path) for path in sorted(tmp_path.iterdir())]
    files = ["--html", str(tmp_path / "p.html"), "--latex", str(tmp_path / "t.tex")]
    assert main("report", [*folders, "--by", "directory", *files]) == 0
    text = (tmp_path / "p.html").read_text()
    page = Page(text)
    assert page.open == []
    (data,) = page.data
    assert {curve["name"] for curve in data["curves"]} >= {"b_%$#{}~^\\", "<!--<script>"}
    # After these two a browser would take "</script>" for data, and show no tables.
    assert "<" not in re.search(r'<script type="application/json">(.*)</script>', text)[1]
    assert "b" not in page.counts
    rows = (tmp_path / "t.tex").read_text()
    assert r"b\_\%\$\#\{\}\textasciitilde{}\textasciicircum{}\textbackslash{}" in rows


def test_names_cannot_break_the_markdown():
    cells = ["a|b", "<img src=x>", "[c](javascript:d)", "e\nf", "g\\|h", "i & j", "1 [0.5, 2]"]
    assert tables.markdown((["1", "2"], [cells])).splitlines()[2] == (
        r"| a\|b | &lt;img src=x> | [c]\(javascript:d) | e f | g\\\|h | i &amp; j | 1 [0.5, 2] |"
    )


def test_names_that_are_not_utf8_are_in_the_report(tmp_path):
    folders = [str(tmp_path / name) for name in ("a\udce4", "b")]
    for folder in folders:  # runs are made under other names only
        make_runs(tmp_path / "made", [1.0, 2.0])
        (tmp_path / "made").rename(folder)
    out = [str(tmp_path / name) for name in ("r.md", "p.html", "t.tex", "n.csv")]
    files = ["--out", out[0], "--html", out[1], "--latex", out[2], "--csv", out[3]]
    options = ["--by", "directory", "--pictures", "none"]
    assert main("report", [*folders, *options, *files]) == 0
    for name in out:
        assert r"a\udce4" in Path(name).read_text(encoding="utf-8") or name == out[0]


@pytest.mark.skipif(shutil.which("node") is None, reason="needs node")
def test_the_script_of_the_page_shows_the_numbers_below_the_pointer(root, tmp_path):
    path = tmp_path / "page.html"
    assert compare(root, "--html", path) == 0
    text = path.read_text()
    data = Page(text).data[0]
    script = "\n".join(part.split("</script>")[0] for part in text.split("<script>")[1:])
    (tmp_path / "run.js").write_text(_BROWSER.format(data=json.dumps(data), script=script))
    done = subprocess.run(
        ["node", str(tmp_path / "run.js")], capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 0, done.stderr
    both, one = done.stdout.strip().split("\n\n")
    middle = re.search(r"^frames ([\d.]+)\na: [\d.]+ \[[\d.]+, [\d.]+\]\nb: ", both)
    assert float(middle[1]) == pytest.approx(550, rel=0.01)
    assert "a: " not in one and "b: " in one


# As much of a browser as the script of a page needs, and a pointer in the middle of the axis.
_BROWSER = """
const on = {{}}, clicks = [], style = () => ({{style: {{}}}});
const groups = [style(), style()], tip = {{offsetWidth: 10, ...style()}};
const cursor = {{setAttribute() {{}}, ...style()}};
const data = {data};
const svg = {{addEventListener: (name, call) => {{ on[name] = call; }},
  getBoundingClientRect: () => ({{left: 0, width: data.size[0]}})}};
const buttons = groups.map(() => ({{pressed: "true", getAttribute() {{ return this.pressed; }},
  setAttribute(_, value) {{ this.pressed = String(value); }},
  addEventListener: (_, call) => clicks.push(call)}}));
const parts = {{script: {{textContent: JSON.stringify(data)}}, svg,
  ".cursor": cursor, ".tip": tip}};
const figure = {{querySelector: name => parts[name],
  querySelectorAll: name => name.includes("button") ? buttons : groups}};
const document = {{querySelectorAll: () => [figure]}};
{script}
const event = {{clientX: (data.left + data.right) / 2}};
on.pointermove(event);
console.log(tip.textContent + "\\n");
clicks[0]();
on.pointermove(event);
console.log(tip.textContent);
on.pointerleave();
if (!tip.hidden) throw new Error("the numbers stay");
"""


@pytest.mark.slow
@pytest.mark.chosen
def test_pictures_are_png_or_svg(root, tmp_path):
    pytest.importorskip("matplotlib")
    for kind, start in (("png", b"\x89PNG"), ("svg", b"<?xml")):
        out = tmp_path / f"{kind}.md"
        assert compare(root, "--out", out, "--pictures", kind, "--normalise", "0", "500") == 0
        shown = re.findall(r"!\[[^\]]*\]\(([^)]*)\)", out.read_text())
        assert len(shown) == 4 + 4 + 1 + 1 + 3
        for name in shown:
            assert (tmp_path / name).read_bytes().startswith(start), name


@pytest.mark.filterwarnings("error")
def test_pictures_have_space_beside_long_names(tmp_path):
    """Matplotlib warns, and draws all over one another, where names leave no space for the axes."""
    pytest.importorskip("matplotlib")
    task = "CheetahRun-v1 (frame_skip=2, max_episode_steps=500)"
    rows = [(f"SAC > TDMPC2, {task}", intervals.Interval(0.4, 0.2, 0.9))]
    bars = charts.Bars(f"Probability of improvement, {task}", "probability", rows, 0.5, None)
    plots.draw(bars, tmp_path / "bars.png")
    x = np.arange(3.0)
    curve = charts.Curve("SAC", x, charts.Band(x, x - 1, x + 1))
    lines = charts.Lines(f"Sample efficiency, {task}", "frames", "returns", [curve])
    plots.draw(lines, tmp_path / "lines.png")


def test_runs_are_found_in_folders_and_sets(tmp_path, capsys):
    """Runs of a preset in several tasks are one method, and have a row for each task."""
    for task in ("CartPole-v1", "Catch"):
        folder = tmp_path / "runs" / task
        make_runs(folder, [1.0, 2.0], env=task)
        Study(preset("cartpole-ppo"), (1, 2, 3)).write(folder)  # the third has not finished
    make_run(tmp_path / "runs" / "single", 3.0, name="cartpole-dqn")
    out, lines = tmp_path / "r.md", tmp_path / "r.csv"
    files = ["--out", str(out), "--csv", str(lines), "--pictures", "none"]
    assert main("report", [str(tmp_path / "runs"), "--normalise", "0", "2", *files]) == 0
    rows = re.findall(r"^\| (cartpole-[^|]*) \|", out.read_text().split("\n## ")[0], re.M)
    assert rows == ["cartpole-dqn", "cartpole-ppo, CartPole-v1", "cartpole-ppo, Catch"]
    found = list(csv.DictReader(lines.read_text().splitlines()))
    assert [x["runs"] for x in found if (x["method"], x["task"]) == ("cartpole-ppo", "all")] == (
        ["4"] * 4
    )
    capsys.readouterr()
    empty = tmp_path / "empty"
    empty.mkdir()
    Study(preset("cartpole-ppo"), (1,)).write(empty)
    assert main("report", [str(empty), *files]) == 1
    assert "none has finished" in capsys.readouterr().err
    assert main("report", [str(tmp_path / "nowhere"), *files]) == 1
    assert "no such directory" in capsys.readouterr().err


def test_equal_last_names_are_told_apart(tmp_path, capsys):
    for folder in ("x", "y"):
        make_runs(tmp_path / folder / "ppo", [1.0, 2.0])
    paths = [str(tmp_path / folder / "ppo") for folder in ("x", "y")]
    page = tmp_path / "r.html"
    assert main("report", [*paths, "--compare", "--html", str(page)]) == 0
    sentence = "x/ppo is better than y/ppo on"  # what differs, and not where the folders are
    assert sentence in capsys.readouterr().out
    assert sentence in page.read_text() and str(tmp_path) not in page.read_text()


def test_mistakes_are_named(root, tmp_path, capsys):
    out = ["--csv", str(tmp_path / "r.csv")]
    for options, error in (
        ([str(root / "a"), "--compare"], "two methods with a task in common"),
        ([str(root / "a"), "--normalise", "atori"], "It takes none, atari"),
        ([str(root / "a"), "--normalise", "atari"], "is not one of alien"),
        ([str(root / "a"), "--by", "seed"], "--by"),
    ):
        assert main("report", [*options, *out]) != 0
        assert error in capsys.readouterr().err
    assert not (tmp_path / "r.csv").exists()


def test_a_single_run_has_a_report(tmp_path):
    run = make_run(tmp_path / "run", 3.0)
    out = tmp_path / "r.html"
    assert main("report", [str(run), "--html", str(out), "--normalise", "0", "3"]) == 0
    text = out.read_text()
    assert "<td>3.000</td>" in text and "[3.000" not in text  # one run has no interval
    assert "fewer than 5 runs are too narrow" in text


def test_numbers_in_cells():
    assert tables.text_of(intervals.Interval(1234.56, 1, 2000), 1) == "1,234.6 [1.0, 2,000.0]"
