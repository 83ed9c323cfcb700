"""The page of `rlstack dashboard` in a headless Chromium, with runs that grow."""

import math
import threading

import pytest

from rlstack.programs.tools.status.dashboard import Dashboard
from rlstack.programs.tools.status.server import DashboardServer
from tests.programs.tools.status.browser import FOUND, browser
from tests.programs.tools.status.dashboards import finish, line, log, make_run

RETURN = "evaluator/episode_return"
HOSTILE = "<img src=x onerror=document.title='bad'>"

pytestmark = [
    pytest.mark.timeout(100),
    pytest.mark.skipif(FOUND is None, reason="no Chromium is on the path"),
]


@pytest.mark.slow
@pytest.mark.chosen
def test_the_page_shows_runs_that_grow_appear_and_are_compared(tmp_path):
    runs = tmp_path / "runs"
    runs.mkdir()
    with (
        DashboardServer(Dashboard(runs), 0) as server,
        browser(tmp_path / "profile") as page,
    ):
        thread = threading.Thread(target=server.serve_forever, args=(0.05,))
        thread.start()
        try:
            page.open(server.address)
            page.wait_for("document.body.innerText.includes('no runs yet')")
            follow(page, runs)
        finally:
            server.shutdown()
            thread.join(10)
        server.server_close()
        page.wait_for("document.querySelector('#note.bad') !== null")  # the page says so


def follow(page, runs):
    for seed in (1, 2):
        finish(make_run(runs / f"seed={seed}", seed))
    growing = make_run(runs / HOSTILE, 3)
    waits = "replay/sample_wait_seconds"
    with growing.claimed():
        log(growing, *(line(100 * i, **{RETURN: 2 * i, waits: 5 * i}) for i in range(4)))
        log(growing, line(400, **{RETURN: math.nan}))
        page.wait_for("document.querySelectorAll('tr[data-run]').length === 3")
        first = "document.querySelector('tr[data-run]')"
        assert page.value(f"{first}.dataset.run") == HOSTILE  # a running one is first
        assert page.value(f"{first}.dataset.state") == "running"
        assert page.value("document.querySelectorAll('tr[data-state=finished]').length") == 2
        assert page.value("document.querySelectorAll('img').length") == 0
        assert page.value("document.title") == "rlstack dashboard"
        assert "Acting is the bottleneck: the learner waits 50%" in shown(page)
        assert page.value("document.querySelectorAll('tr[data-node=train]').length") == 1
        curves = f"document.querySelectorAll('figure[data-plot=\"{RETURN}\"] g[data-curve]')"
        page.wait_for(f"{curves}.length === 1")  # seeds are joined by default
        page.click("#seeds")
        page.wait_for(f"{curves}.length === 3")
        line_of = f"{curves}[0].querySelector('polyline').getAttribute('points')"
        before = page.value(line_of)
        assert before.count(",") == 4  # NaN has no place on the curve
        log(growing, line(2000, **{RETURN: 20}))
        page.wait_for("document.body.innerText.includes('2,000/1,000')")
        page.wait_for(f"{line_of} !== '{before}'")
        page.click("#seeds")
        page.wait_for(f"{curves}.length === 1")  # the runs differ in the seed only
        assert page.value(f"{curves}[0].querySelector('polygon') !== null")
        page.move_to("figure svg")
        page.wait_for("document.querySelector('.cursor').style.visibility === 'visible'")
        # There, two runs are at frames / 100, and one between 6 at 300 and 20 at 2000.
        tip = page.value("document.querySelector('.tip').textContent")
        assert tip == "frames 457.6\ncartpole-ppo: 5.483 [4.576, 7.298]"
        page.click("#seeds")
        page.wait_for(f"{curves}.length === 3")
        page.click("input[id='show seed=1']")
        page.wait_for(f"{curves}.length === 2")
        page.click("#filter")
        page.send("Input.insertText", text="seed=2")
        page.wait_for("document.querySelectorAll('tr[data-run]').length === 1")
        page.value(
            "(axis => { axis.value = 'hours'; axis.oninput(); })(document.querySelector('#axis'))"
        )
        page.wait_for("document.querySelector('figure')?.innerText.includes('hours')")


@pytest.mark.slow
@pytest.mark.chosen
def test_the_table_sorts_links_keep_the_selection_and_phones_have_room(tmp_path):
    runs = tmp_path / "runs"
    for name, seed, discount, env in (
        ("a", 1, 0.9, "Pong"), ("b", 2, 0.99, "Pong"), ("c", 3, 0.5, "Tag"),
    ):  # fmt: skip
        finish(make_run(runs / name, seed, discount, env))
    order = "[...document.querySelectorAll('tr[data-run]')].map(row => row.dataset.run).join('')"
    figures = (
        "[...document.querySelectorAll('figure')].map(figure => figure.dataset.plot).join('; ')"
    )
    with (
        DashboardServer(Dashboard(runs), 0) as server,
        browser(tmp_path / "profile") as page,
    ):
        thread = threading.Thread(target=server.serve_forever, args=(0.05,))
        thread.start()
        try:
            page.open(server.address)
            page.wait_for("document.querySelectorAll('tr[data-run]').length === 3")
            page.click("button[id='sort agent.discount']")
            page.wait_for(f"{order} === 'cab'")
            page.click("button[id='sort agent.discount']")
            page.wait_for(f"{order} === 'bac'")
            page.wait_for(f"{figures}.includes('{RETURN}, Pong; {RETURN}, Tag')")
            page.click("input[id='show c']")
            page.wait_for(f"{figures} === '{RETURN}'")
            ends = "JSON.parse(document.querySelector('figure script').textContent).x"
            assert page.value(ends) == [0, 1000]
            page.drag("figure svg", 0.5, 0.8)
            page.wait_for(f"{ends}[0] > 300")
            low, high = page.value(ends)
            assert 300 < low < high < 900
            page.click("#log")
            page.value(
                "(x => { x.value = 'dark'; x.oninput(); })(document.querySelector('#theme'))"
            )
            assert page.value("getComputedStyle(document.documentElement).colorScheme") == "dark"
            link = page.value("location.href")
            page.value(
                "void fetch(document.querySelector('#data').href).then(answer => answer.text())"
                ".then(text => { window.got = text; })"
            )
            page.wait_for("window.got !== undefined")
            data = page.value("window.got")
            assert data.splitlines()[1].startswith("Pong,cartpole-ppo")
            page.open(link, width=360, height=700)
            page.wait_for("document.querySelectorAll('tr[data-run]').length === 3")
            assert page.value(order) == "bac"
            assert page.value("document.querySelector('#log').checked")
            assert page.value("getComputedStyle(document.documentElement).colorScheme") == "dark"
            page.wait_for(f"{figures} === '{RETURN}'")
            assert page.value(ends) == [low, high]
            assert page.value("document.querySelector('[id=\"show c\"]').checked") is False
            assert page.value("document.documentElement.scrollWidth") <= 360
        finally:
            server.shutdown()
            thread.join(10)


def shown(page):
    return page.value("document.body.innerText")
