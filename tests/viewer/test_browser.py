"""The page in a real browser: a live run of the public command, and texts that try to become scripts."""

from __future__ import annotations

import itertools
import json
import math
import os
import re
import shutil
import subprocess
import sys
from contextlib import contextmanager
from pathlib import Path

import pytest
from tests.plugins import needs_plugin
from tests.stacks.run_files import step, write_lines, write_run

from areal_actors.dashboard import write_report
from areal_actors.lib.plugins import PluginGroup

playwright = pytest.importorskip("playwright.sync_api", reason="pip install playwright")
axe = pytest.importorskip("axe_playwright_python.sync_playwright", reason="pip install axe-playwright-python")
CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="there is no Chromium: apt-get install chromium")
EXAMPLES = Path(__file__).parents[2] / "examples"


@contextmanager
def opened(url: str, **options):
    """A tab on the page of ``url``, and what its console complained about."""
    complaints: list[str] = []
    with playwright.sync_playwright() as started:
        browser = started.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        tab = browser.new_context(**options).new_page()
        tab.on("console", lambda line: complaints.append(line.text) if line.type in ("error", "warning") else None)
        tab.on("pageerror", lambda error: complaints.append(str(error)))
        tab.goto(url)
        try:
            yield tab, complaints
        finally:
            browser.close()


def find_violations(tab) -> list[str]:
    """What axe finds on the page, of any level."""
    return [f"{one['id']}: {one['nodes'][0]['html']}" for one in axe.Axe().run(tab).response["violations"]]


@contextmanager
def command(*words: str, cwd: Path | None = None):
    """A process of ``areal-actors`` that has printed the URL of its page."""
    process = subprocess.Popen(
        [sys.executable, "-m", "areal_actors", *words],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        cwd=cwd,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
    )
    try:
        assert process.stdout is not None
        found = next(match for line in process.stdout if (match := re.search(r"http://\S+token=\S+", line)))
        yield found[0]
    finally:
        process.terminate()
        process.communicate(timeout=60)


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_page_shows_all_views(tmp_path: Path, scheme):
    """Curves of two runs, conversations token by token, failures, settings: without a complaint of console or axe.

    Scripts in the texts of models stay text.
    """
    write_run(tmp_path / "shown" / "one", num_steps=4)
    write_run(tmp_path / "shown" / "two")
    with command("view", str(tmp_path)) as url, opened(url, color_scheme=scheme) as (tab, complaints):
        expect = playwright.expect
        tab.wait_for_selector(".chart canvas")
        tab.check('input[aria-label="show shown/one"]')
        expect(tab.locator(".chart").first).to_contain_text("shown/one")
        assert "token" not in tab.url
        assert [] == find_violations(tab)

        tab.click("#tab-conversations")
        sample = tab.locator("#sample")
        tab.click("button.problem:has-text('document.title')")
        expect(tab.locator(".sibling")).to_have_text(["0", "1"])
        expect(sample).to_contain_text("Sample 1 earned 1, 0.5 above the mean of its group.")
        for text in (
            "Step 2 pushed 1 token up (advantage +0.5) and 1 token down (advantage -0.25).",
            "<script>",
            "New branch of tokens: edited answer.",
            "Not trained: turned away.",
            "format_ok 1",
            "add({})",
        ):
            expect(sample).to_contain_text(text)
        assert [1, 1, 2] == [sample.locator(f".turn .tokens {name}").count() for name in (".up3", ".down2", ".off")]
        sample.locator(".turn .down2").click()
        expect(sample).to_contain_text("probability 0.0302 (log -3.5) · advantage -0.25 · version 2")
        assert [] == find_violations(tab)

        tab.click("#tab-failures")
        tab.click("summary >> nth=0")
        expect(tab.locator("#view")).to_contain_text("line 9")
        assert [] == find_violations(tab)
        tab.click("#tab-settings")
        expect(tab.locator("#view")).to_contain_text("No setting matches.")  # of two runs with the same settings
        tab.select_option('select[aria-label="which settings"]', "changed")
        expect(tab.locator("#view")).to_contain_text("experiment_name")
        assert [] == find_violations(tab)
        assert "broken into" != tab.title()
    assert [] == complaints


def test_page_is_used_with_the_keyboard_and_linked(tmp_path: Path):
    """One tab stop for all views, arrow keys in views, problems and samples; the address leads back to each of them."""
    write_run(tmp_path / "shown" / "one")
    with command("view", str(tmp_path)) as url, opened(url) as (tab, complaints):
        expect = playwright.expect
        tab.wait_for_selector(".chart canvas")
        tab.focus("#tab-curves")
        assert 1 == tab.locator('[role="tab"][tabindex="0"]').count()
        tab.keyboard.press("ArrowRight")
        expect(tab.locator("#tab-conversations")).to_be_focused()
        tab.focus("button.problem >> nth=0")
        tab.keyboard.press("ArrowDown")
        expect(tab.locator("#group")).to_contain_text("problem 0 · version 1")
        expect(tab.locator("#sample")).to_contain_text("Sample 1 earned 1")
        tab.keyboard.press("ArrowLeft")  # from the list, and back among the samples
        expect(tab.locator("#sample")).to_contain_text("Sample 0 earned 0")
        tab.focus('.sibling[tabindex="0"]')
        tab.keyboard.press("ArrowRight")
        expect(tab.locator("#sample")).to_contain_text("Sample 1 earned 1")
        tab.keyboard.press("ArrowLeft")
        expect(tab.locator("#sample")).to_contain_text("Sample 0 earned 0, 0.5 below")
        expect(tab.locator("#sample")).to_contain_text("Tokens are kept of some conversations")
        link = tab.url
        tab.click("#tab-curves")
        tab.go_back()
        expect(tab.locator("#sample")).to_contain_text("Sample 0 earned 0")
        tab.goto("about:blank")
        tab.goto(link)
        expect(tab.locator("#sample")).to_contain_text("Sample 0 earned 0")
        assert "task=0" in link
    assert [] == complaints


def test_page_compares_many_runs(tmp_path: Path):
    """Sorted, filtered, ticked together, averaged over seeds, zoomed and saved; each has a colour of its own."""
    for number in range(40):
        directory = write_run(tmp_path / "shown" / f"run{number}")
        config = f"seed: {number % 2}\nbatch_size: {number // 2 + 1}\n"
        if number == 39:
            config += "dataset: {size: 5}\neval_dataset: {size: 6}\ntrainer: {metrics: [/a/mine.py:lengths]}\n"
        directory.config.write_text(config)
        write_lines(directory.metrics, [step(at, eval_reward=number / 40) for at in range(1, 4)])
    with command("view", str(tmp_path)) as url, opened(url) as (tab, complaints):
        expect, rows = playwright.expect, tab.locator("#run-table tbody tr")
        tab.wait_for_selector(".chart canvas")
        expect(rows).to_have_count(40)
        assert [f"shown/run{number}" for number in range(40)] == tab.locator("#run-table button.name").all_inner_texts()
        tab.click("th >> text=held out")
        tab.click("th >> text=held out")
        expect(rows.first).to_contain_text("shown/run39")
        for setting in ("batch_size=20", " dataset.size=5", "eval_dataset.size=6", "metrics=[mine.py:lengths]"):
            expect(rows.first).to_contain_text(setting)
        colors = tab.locator("#run-table .swatch").evaluate_all("all => all.map((one) => one.style.background)")
        assert 40 == len(set(colors))
        assert min_distance(colors) > 0.03

        tab.fill('input[aria-label="filter runs"]', "batch_size=2 seed=1")
        expect(rows).to_have_count(2)  # of batch sizes 2 and 20
        tab.fill('input[aria-label="filter runs"]', "run4")
        expect(rows).to_have_count(1)
        tab.click("button:text('All')")
        tab.fill('input[aria-label="filter runs"]', "run5")
        tab.click("button:text('All')")
        tab.select_option('select[aria-label="how runs are drawn"]', "mean")
        expect(tab.locator(".chart").first).to_contain_text("shown batch_size=3 (2 runs) training")
        assert [] == find_violations(tab)

        chart = tab.locator(".chart .u-over").first.bounding_box()
        tab.mouse.move(chart["x"] + 5, chart["y"] + 20)
        tab.mouse.down()
        tab.mouse.move(chart["x"] + chart["width"] / 3, chart["y"] + 20)
        tab.mouse.up()
        expect(tab.locator("#reset-zoom")).to_be_visible()
        tab.click("#reset-zoom")
        expect(tab.locator("#reset-zoom")).to_be_hidden()
        with tab.expect_download() as numbers:
            tab.click("button:text('CSV')")
        assert numbers.value.path().read_text().startswith("run,step,version")
        with tab.expect_download() as picture:
            tab.click("button[aria-label='Save Reward as PNG']")
        assert picture.value.path().read_bytes().startswith(b"\x89PNG")
    assert [] == complaints


def min_distance(colors: list[str]) -> float:
    """The smallest distance of two colours in the Oklab space, in which 0.02 can just be seen."""
    points = []
    for color in colors:
        lightness, chroma, hue = (float(number) for number in re.findall(r"[\d.]+", color))
        angle = math.radians(hue)
        points.append((lightness, chroma * math.cos(angle), chroma * math.sin(angle)))
    return min(math.dist(first, second) for first, second in itertools.combinations(points, 2))


def test_page_filters_conversations_and_failures(tmp_path: Path):
    """By text, rewards, version, source and kind; in the dark and on a phone, too. What is typed survives an update."""
    directory = write_run(tmp_path / "shown" / "one")
    write_lines(directory.metrics, [step(number, **{"source/easy/reward": 0.5}) for number in range(1, 4)])
    with command("view", str(tmp_path)) as url, opened(url) as (tab, complaints):
        rows, expect = tab.locator("tr.pick"), playwright.expect
        tab.wait_for_selector(".chart canvas")
        tab.click("#tab-conversations")
        expect(rows).to_have_count(3)
        tab.select_option('select[aria-label="rewards"]', "equal rewards")
        expect(rows).to_have_count(1)
        assert "11" in rows.inner_text()
        tab.select_option('select[aria-label="rewards"]', "any rewards")
        tab.fill('input[aria-label="highest mean reward"]', "0.75")
        tab.keyboard.press("Enter")
        expect(rows).to_have_count(1)
        expect(tab.locator("#num-groups")).to_contain_text("1 problem.")

        tab.emulate_media(color_scheme="dark")
        tab.set_viewport_size({"width": 390, "height": 800})
        write_lines(
            directory.rollouts / "2" / "easy-3.jsonl", [{"reward": 0.5, "prompt": "mountain", "completion": ""}]
        )
        expect(rows).to_have_count(2, timeout=20_000)
        tab.fill('input[aria-label="search conversations"]', "Mountain")
        tab.keyboard.press("Enter")
        expect(rows).to_have_count(1)
        tab.click("tr.pick")
        expect(tab.locator("#group")).to_contain_text("problem easy-3 · version 2")
        for width in (320, 390):
            tab.set_viewport_size({"width": width, "height": 800})
            boxes = [button.bounding_box() for button in tab.locator("#tabs button").all()]
            assert all(box is not None and box["x"] >= 0 and box["x"] + box["width"] <= width for box in boxes)
            assert tab.evaluate("document.documentElement.scrollWidth <= innerWidth")

        tab.click("#tab-failures")
        cards = tab.locator("#failures details")
        expect(cards).to_have_count(2)
        tab.select_option('select[aria-label="source"]', "easy")
        expect(tab.locator("#failures")).to_contain_text("No failure matches.")
        tab.select_option('select[aria-label="source"]', "")
        tab.fill('input[aria-label="first version"]', "2")
        tab.keyboard.press("Enter")
        expect(cards).to_have_count(1)
        tab.fill('input[aria-label="first version"]', "")
        tab.fill('input[aria-label="search failures"]', "late")
        tab.keyboard.press("Enter")
        expect(cards).to_contain_text(["TimeoutError: late"])
        tab.click("#failures summary")
        failures = [json.loads(line) for line in directory.failures.read_text().splitlines()]
        write_lines(directory.failures, [*failures, failures[1] | {"task_id": "77"}])
        expect(cards).to_contain_text(["problem 77"], timeout=20_000)
        expect(cards).to_have_attribute("open", "")
        tab.select_option('select[aria-label="kind of failure"]', "rejected")
        expect(tab.locator("#failures")).to_contain_text("No failure matches.")
        assert tab.evaluate("document.documentElement.scrollWidth <= innerWidth")
    assert [] == complaints


@needs_plugin(PluginGroup.COMMANDS, "host")
def test_host_page_shows_trials_to_their_users(tmp_path: Path):
    """The operator filters all trials by name and state, and follows a link; a user logs in and finds one."""
    runs = tmp_path / "runs"
    for name in ("ada", "bob"):
        write_run(runs / "sums" / name)
    issue = [sys.executable, "-m", "areal_actors", "keys", "create", "ada", "--store", str(runs / "keys.sqlite")]
    issued = subprocess.run(
        [*issue, "--experiment", "sums", "--trial", "ada"], capture_output=True, text=True, check=True
    )
    words = ("host", "serve.yaml", "host.port=0", f"fileroot={runs}")
    with command(*words, cwd=EXAMPLES) as url:
        with opened(url) as (tab, complaints):
            tab.wait_for_selector(".chart canvas")
            playwright.expect(tab.locator("#run-table tbody tr")).to_have_count(2)
            assert "stopped" in tab.inner_text("#runs")
            tab.fill('input[aria-label="filter runs"]', "BOB stop")
            playwright.expect(tab.locator("#run-table tbody tr")).to_have_count(1)
            tab.click("#run-table button.name")
            playwright.expect(tab.locator("#title")).to_have_text("sums/bob")
            tab.goto(f"{tab.url.partition('#')[0]}#sums%2Fbob")
            tab.reload()
            playwright.expect(tab.locator("#title")).to_have_text("sums/bob")
            assert [] == complaints
        with opened(url.partition("?")[0], viewport={"width": 390, "height": 800}) as (tab, complaints):
            assert [] == find_violations(tab)
            tab.fill("input[name=key]", issued.stdout.strip())
            tab.click("button")
            playwright.expect(tab.locator("#title")).to_have_text("sums/ada")
            playwright.expect(tab.locator("#run-table tbody tr")).to_have_count(1)
            tab.click("#tab-conversations")
            tab.wait_for_selector("tr.pick")
            assert tab.evaluate("document.documentElement.scrollWidth <= innerWidth")
            assert [] == complaints


def test_page_draws_a_live_run(tmp_path: Path):
    """On the page that ``train`` serves, curves grow without a reload; on a phone, nothing is wider than the screen."""
    words = ("train", "tiny.yaml", "total_steps=200", "logging.display=plain", "--run-dir", str(tmp_path / "run"))
    with command(*words, cwd=EXAMPLES) as url, opened(url, viewport={"width": 390, "height": 800}) as (tab, complaints):
        tab.wait_for_selector(".chart canvas", timeout=60_000)
        assert "live" == tab.inner_text("#state")
        num_steps = tab.locator("#summary dd").first
        playwright.expect(num_steps).not_to_have_text(num_steps.inner_text(), timeout=60_000)
        tab.click("#tab-system")
        tab.wait_for_selector("td:text-is('sessions')")
        assert tab.evaluate("document.documentElement.scrollWidth <= innerWidth")
    assert [] == complaints


def test_report_is_readable(tmp_path: Path):
    """On a phone, with a long word in a failure; and of a run without a step, which has no curve."""
    directory = write_run(tmp_path / "shown" / "one")
    write_lines(directory.failures, [{"failure": "no_space_" * 200, "task_id": "1", "version": 1}])
    empty = write_run(tmp_path / "shown" / "empty", num_steps=0)
    for run, has_curve in ((directory, True), (empty, False)):
        with opened(write_report(run).as_uri(), viewport={"width": 390, "height": 800}) as (tab, complaints):
            assert [] == find_violations(tab)
            assert tab.evaluate("document.documentElement.scrollWidth <= innerWidth")
            assert has_curve == tab.locator("svg").is_visible()
            assert [] == complaints
