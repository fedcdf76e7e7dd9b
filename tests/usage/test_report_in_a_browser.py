"""The report as people see it: opened in a browser, clicked, zoomed and searched; skipped where there is no browser.

What is on a canvas is told from the colours of its pixels, and from the legend.
"""

import json
import math
from collections.abc import Generator
from pathlib import Path
from threading import Thread

import pytest
from browser import DoesNotStart, Tab, browsing, found

from evenstep.tools.report.follow import address_of, server
from evenstep.tools.report.page import write_page

PROGRAM = found()
pytestmark = [
    pytest.mark.skipif(PROGRAM is None, reason="no Chromium on this machine (apt-get install chromium)"),
    pytest.mark.xdist_group("browser"),
]

UPDATES = 400
LOSS = 'figure[data-title="loss"]'


@pytest.fixture(scope="module")
def tab() -> Generator[Tab]:
    assert PROGRAM is not None
    try:
        with browsing(PROGRAM) as tab:
            yield tab
    except DoesNotStart as error:
        pytest.skip(f"{PROGRAM} does not start here: {error}")


def write_run(folder: Path, *, lr: float, until: int = UPDATES, state: str = "done") -> Path:
    folder.mkdir()
    lines = []
    for update in range(1, until + 1):
        loss = 4 * math.exp(-update * lr) + 0.3 * math.sin(1.7 * update) + 1
        line: dict[str, object] = {"update": update, "train/loss": loss, "train/lr": lr}
        line |= {f"train/grad_norm/blocks.{layer}": 1 + layer / 100 for layer in range(20)}
        if update % 10 == 0:
            line |= {"perf/update_s": 0.5, "perf/data_s": 0.1, "perf/forward_s": 0.3, "progress/samples": 8 * update}
            line |= {"perf/time": 1.8e9 + 0.5 * update, "progress/tokens": 1024 * update, "perf/memory_peak_bytes": 4e8}
        if update % 100 == 0:
            line["valid/loss"] = loss
        lines.append(json.dumps(line))
    (folder / "metrics.jsonl").write_text("\n".join(lines) + "\n")
    (folder / "config.toml").write_text(f'name = "{folder.name}"\n[optimizer]\nlr = {lr}\n')
    (folder / "status.json").write_text(json.dumps({"state": state, "update": until, "updates": UPDATES}))
    incident = {"update": min(200, until), "kind": "overflow", "message": "the loss scale was halved"}
    (folder / "incidents.jsonl").write_text(json.dumps(incident) + "\n")
    return folder


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    folder = tmp_path_factory.mktemp("runs")
    return [
        write_run(folder / "slow", lr=0.01),
        write_run(folder / "fast", lr=0.03),
        write_run(folder / "broken", lr=0.1, until=150, state="failed"),
    ]


def open_page(tab: Tab, runs: list[Path], *, width: int = 1280) -> None:
    page = write_page(runs, runs[0].parent / f"{len(runs)}.html")
    tab.resize(width, 900, mobile=width < 500)
    tab.prefer("light")
    tab.problems.clear()
    tab.open(page.as_uri())
    tab.wait(f"document.querySelector('{LOSS} canvas')")


def pixels(tab: Tab, name: str, selector: str = LOSS) -> int:
    """How many pixels of a chart have the colour of this name."""
    return tab.run(
        f"""(() => {{
          const canvas = document.querySelector('{selector} canvas');
          const hex = getComputedStyle(document.documentElement).getPropertyValue('{name}').trim();
          const [r, g, b] = [1, 3, 5].map(place => parseInt(hex.slice(place, place + 2), 16));
          const all = canvas.getContext('2d').getImageData(0, 0, canvas.width, canvas.height).data;
          let count = 0;
          for (let at = 0; at < all.length; at += 4)
            count += all[at] === r && all[at + 1] === g && all[at + 2] === b && all[at + 3] === 255;
          return count;
        }})()"""
    )


def text(tab: Tab, selector: str) -> str:
    return tab.run(f"document.querySelector({json.dumps(selector)}).innerText.replace(/\\s+/g, ' ').trim()")


def legend(tab: Tab, selector: str = LOSS) -> dict[str, str]:
    """What the legend of a chart says, by the curves' names."""
    rows = f"[...document.querySelectorAll('{selector} .u-legend .u-series')].filter(one => !one.hidden)"
    cells = "[one.querySelector('.u-label').textContent, one.querySelector('.u-value').textContent]"
    return dict(tab.run(f"{rows}.map(one => {cells})"))


def slide(tab: Tab, percent: int) -> None:
    """Smooth by so many percent of the run."""
    tab.run(
        f"(one => {{ one.value = {percent}; one.dispatchEvent(new Event('input')); }})"
        "(document.getElementById('smooth'))"
    )


def ends(tab: Tab) -> list[int]:
    """First and last update beneath the loss chart, as its cursor reads them at both ends."""
    left, right, middle = inside_plot(tab)
    found: list[int] = []
    for place in (left + 1, right - 1):
        tab.hover(place, middle)
        found.append(int(legend(tab)["update"].replace(",", "")))
    return found


def inside_plot(tab: Tab) -> tuple[float, float, float]:
    """Left and right of the loss chart's drawing, and its middle from top to bottom."""
    tab.center(f"{LOSS} .u-over")
    box = tab.run(
        f"(() => {{ const b = document.querySelector('{LOSS} .u-over').getBoundingClientRect(); "
        "return [b.left, b.right, b.top + b.height / 2]; })()"
    )
    return box[0], box[1], box[2]


def test_curves_of_several_runs_are_drawn_each_in_its_colour_and_hidden_by_a_click(tab: Tab, runs: list[Path]) -> None:
    open_page(tab, runs)
    assert all(pixels(tab, name) > 100 for name in ("--c0", "--c1", "--c2"))
    tab.click("input.run[data-run='1']")
    assert pixels(tab, "--c1") == 0
    assert pixels(tab, "--c0") > 100
    tab.click("input.run[data-run='1']")
    assert pixels(tab, "--c1") > 100
    assert pixels(tab, "--bad") > 10  # the marks of incidents
    assert {"slow train, smoothed", "slow valid", "broken train, smoothed"} <= legend(tab).keys()
    assert tab.problems == []


def test_charts_are_zoomed_by_dragging_and_go_back(tab: Tab, runs: list[Path]) -> None:
    open_page(tab, runs[:1])
    assert ends(tab) == pytest.approx([1, UPDATES], abs=2)
    left, right, middle = inside_plot(tab)
    tab.drag((left + (right - left) / 4, middle), ((left + right) / 2, middle))
    assert ends(tab) == pytest.approx([UPDATES / 4, UPDATES / 2], abs=4)
    assert tab.run("document.querySelector('#all').disabled") is False
    tab.double_click((left + right) / 2, middle)
    assert ends(tab) == pytest.approx([1, UPDATES], abs=2)
    tab.drag((left + (right - left) / 4, middle), ((left + right) / 2, middle))
    tab.click("#all")
    assert ends(tab) == pytest.approx([1, UPDATES], abs=2)
    assert tab.problems == []


def test_runs_are_sorted_by_a_click_on_a_column(tab: Tab, runs: list[Path]) -> None:
    open_page(tab, runs)
    names = "[...document.querySelectorAll('.sortable tbody th')].map(one => one.innerText.trim())"
    headings = "[...document.querySelectorAll('.sortable thead th')]"
    rate = f"{headings}.find(one => one.innerText.startsWith('optimizer.lr')).click()"
    tab.run(rate)
    assert tab.run(names) == ["slow", "fast", "broken"]
    tab.run(
        rate.replace("one.innerText ===", "one.innerText.startsWith").replace("'optimizer.lr')", "('optimizer.lr'))")
    )
    assert tab.run(names) == ["broken", "fast", "slow"]
    tab.click("input.run[data-run='0']")
    assert pixels(tab, "--c0") == 0
    assert tab.problems == []


def test_the_slider_smooths_curves(tab: Tab, runs: list[Path]) -> None:
    open_page(tab, runs[:1])
    raw = 4 * math.exp(-UPDATES * 0.01) + 0.3 * math.sin(1.7 * UPDATES) + 1
    slide(tab, 0)
    assert float(legend(tab)["train"]) == pytest.approx(raw, abs=1e-3)
    window = [4 * math.exp(-u * 0.01) + 0.3 * math.sin(1.7 * u) + 1 for u in range(1, UPDATES + 1) if u >= 360.1]
    slide(tab, 20)
    assert float(legend(tab)["train, smoothed"]) == pytest.approx(sum(window) / len(window), abs=1e-3)
    assert text(tab, "#width") == "20 %"
    assert tab.problems == []


def test_a_metric_is_found_among_many_by_parts_of_its_name(tab: Tab, runs: list[Path]) -> None:
    open_page(tab, runs[:1])
    assert tab.run("document.querySelector('details[data-group=grad_norm]').open") is False  # too many to be open
    tab.click("#find")
    tab.write("norm blocks.17")
    charts = "[...document.querySelectorAll('figure[data-chart]')].filter(one => one.offsetParent)"
    assert tab.run(f"{charts}.map(one => one.dataset.title)") == ["grad_norm/blocks.17"]
    tab.wait("document.querySelector('figure[data-title=\"grad_norm/blocks.17\"] canvas')")
    rows = "[...document.querySelectorAll('tr[data-metric]')].filter(one => one.offsetParent).length"
    assert tab.run(rows) == 1
    tab.write(" nothing")
    assert tab.run(f"{charts}.length") == 0
    assert tab.problems == []


def test_the_mouse_reads_an_incident(tab: Tab, runs: list[Path]) -> None:
    open_page(tab, runs[:1])
    left, right, middle = inside_plot(tab)
    tab.hover(left + (right - left) * (200 - 1) / (UPDATES - 1), middle)
    assert text(tab, f"{LOSS} .said") == "update 200, overflow: the loss scale was halved"
    assert tab.problems == []


def test_a_logarithmic_axis_is_switched_by_a_click_and_colours_follow_the_system(tab: Tab, runs: list[Path]) -> None:
    open_page(tab, runs[:1])
    before = pixels(tab, "--c0")
    tab.click(f"{LOSS} .log")
    assert pixels(tab, "--c0") not in (0, before)
    tab.run(f"document.querySelector('{LOSS} canvas').id = 'light'")
    paper = "getComputedStyle(document.body).backgroundColor"
    assert tab.run(paper) == "rgb(255, 255, 255)"
    tab.prefer("dark")
    assert tab.run(paper) == "rgb(18, 20, 23)"
    tab.wait("!document.getElementById('light')")  # drawn anew
    tab.run("new Promise(done => requestAnimationFrame(() => requestAnimationFrame(done)))")
    assert pixels(tab, "--c0") > 100
    tab.prefer("light")
    assert tab.problems == []


@pytest.mark.parametrize("number", [1, 3])
@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_on_a_phone_nothing_stands_out_of_the_page(tab: Tab, runs: list[Path], number: int, scheme: str) -> None:
    open_page(tab, runs[:number] if number > 1 else runs[2:], width=390)
    tab.prefer(scheme)
    assert tab.run("document.documentElement.scrollWidth") <= 390
    assert tab.run(f"document.querySelector('{LOSS} canvas').getBoundingClientRect().right") <= 390
    assert tab.problems == []


def test_a_followed_page_shows_what_is_new_and_keeps_what_was_chosen(tab: Tab, tmp_path: Path) -> None:
    run = write_run(tmp_path / "live", lr=0.02, until=100, state="running")
    with server([run]) as serving:
        thread = Thread(target=serving.serve_forever, kwargs={"poll_interval": 0.02})
        thread.start()
        try:
            tab.resize(1280, 900)
            tab.problems.clear()
            tab.open(address_of(serving))
            tab.wait(f"document.querySelector('{LOSS} canvas')")
            assert ends(tab)[1] == pytest.approx(100, abs=1)
            slide(tab, 0)
            tab.wait("document.body.dataset.seen")
            with (run / "metrics.jsonl").open("a") as file:
                file.write('{"update": 110, "train/loss": 1.5}\n')
            (run / "status.json").write_text(
                '{"state": "done", "update": 110, "updates": 110, "reason": "all is done"}'
            )
            tab.wait("document.querySelector('.why').innerText.includes('all is done')")
            assert legend(tab)["train"] == "1.5"  # as before, not smoothed
            assert tab.problems == []
        finally:
            serving.shutdown()
            thread.join()
