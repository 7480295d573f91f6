"""The page in a real browser: a live run of the public command, and texts that try to become scripts."""

from __future__ import annotations

import json
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

from areal_actors.lib.plugins import PluginGroup

playwright = pytest.importorskip("playwright.sync_api", reason="pip install playwright")
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
    """Curves of two runs, groups, a conversation with reasons and tokens, failures: without a complaint of the console.

    Scripts in the texts of models stay text.
    """
    write_run(tmp_path / "shown" / "one", num_steps=4)
    write_run(tmp_path / "shown" / "two")
    with command("view", str(tmp_path)) as url, opened(url, color_scheme=scheme) as (tab, complaints):
        tab.wait_for_selector(".chart canvas")
        tab.check('input[aria-label="overlay shown/two"]')
        tab.wait_for_selector("text=shown/two")
        assert "token" not in tab.url

        tab.click("#tab-groups")
        tab.click("tr.pick >> nth=0")
        tab.wait_for_selector("#detail .columns")
        assert "+0.5 against the group's mean" in tab.inner_text("#detail")
        assert "<script>" in tab.inner_text("#detail")
        tab.click("tr.pick >> nth=1")
        playwright.expect(tab.locator("#detail")).to_contain_text("Problem 11")
        assert "not trained ·" in tab.inner_text("#detail")
        assert "equal: no signal" in tab.inner_text("main")

        tab.click("#tab-conversations")
        playwright.expect(tab.locator("tr.pick")).to_have_count(2)
        tab.select_option('select[aria-label="filter"]', "untrained")
        playwright.expect(tab.locator("tr.pick")).to_have_count(1)
        tab.click("tr.pick")
        tab.wait_for_selector(".tokens")
        text = tab.inner_text("main")
        assert "New branch of tokens: edited answer." in text
        assert "Not trained: turned away." in text
        assert "format_ok 1" in text
        assert 2 == tab.locator(".tokens i.on").count()

        tab.click("#tab-failures")
        tab.click("summary >> nth=0")
        playwright.expect(tab.locator("main")).to_contain_text("line 9")
        tab.click("#tab-settings")
        playwright.expect(tab.locator("main")).to_contain_text("experiment_name: shown")
        assert "broken into" != tab.title()
    assert [] == complaints


def test_page_filters_groups_and_failures(tmp_path: Path):
    """By text, rewards, version, source and kind; in the dark and on a phone, too. What is typed survives an update."""
    directory = write_run(tmp_path / "shown" / "one")
    write_lines(directory.metrics, [step(number, **{"source/easy/reward": 0.5}) for number in range(1, 4)])
    with command("view", str(tmp_path)) as url, opened(url) as (tab, complaints):
        rows, expect = tab.locator("tr.pick"), playwright.expect
        tab.wait_for_selector(".chart canvas")
        tab.click("#tab-groups")
        expect(rows).to_have_count(2)
        tab.select_option('select[aria-label="rewards"]', "equal rewards")
        expect(rows).to_have_count(1)
        assert "11" in rows.inner_text()
        tab.select_option('select[aria-label="rewards"]', "any rewards")
        tab.fill('input[aria-label="highest mean reward"]', "0.75")
        tab.keyboard.press("Enter")
        expect(rows).to_have_count(1)
        expect(tab.locator("#num-groups")).to_contain_text("1 group.")

        tab.emulate_media(color_scheme="dark")
        tab.set_viewport_size({"width": 390, "height": 800})
        tab.fill('input[aria-label="highest mean reward"]', "")
        tab.select_option('select[aria-label="version"]', "all")
        expect(rows).to_have_count(2)
        write_lines(
            directory.rollouts / "2" / "easy-3.jsonl", [{"reward": 0.5, "prompt": "mountain", "completion": ""}]
        )
        expect(rows).to_have_count(3, timeout=20_000)
        tab.fill('input[aria-label="search groups"]', "Mountain")
        tab.keyboard.press("Enter")
        expect(rows).to_have_count(1)
        tab.click("tr.pick")
        expect(tab.locator("#detail")).to_contain_text("Problem easy-3, version 2")
        for width in (320, 390):
            tab.set_viewport_size({"width": width, "height": 800})
            boxes = [button.bounding_box() for button in tab.locator("#tabs button").all()]
            assert all(box is not None and box["x"] >= 0 and box["x"] + box["width"] <= width for box in boxes)
            assert tab.evaluate("document.documentElement.scrollWidth <= innerWidth")

        tab.click("#tab-failures")
        cards = tab.locator("main details")
        expect(cards).to_have_count(2)
        tab.select_option('select[aria-label="source"]', "easy")
        expect(tab.locator("main")).to_contain_text("No failure matches.")
        tab.select_option('select[aria-label="source"]', "")
        tab.fill('input[aria-label="first version"]', "2")
        tab.keyboard.press("Enter")
        expect(cards).to_have_count(1)
        tab.fill('input[aria-label="first version"]', "")
        tab.fill('input[aria-label="search failures"]', "late")
        tab.keyboard.press("Enter")
        expect(cards).to_contain_text(["TimeoutError: late"])
        tab.click("summary")
        failures = [json.loads(line) for line in directory.failures.read_text().splitlines()]
        write_lines(directory.failures, [*failures, failures[1] | {"task_id": "77"}])
        expect(cards).to_contain_text(["problem 77"], timeout=20_000)
        expect(cards).to_have_attribute("open", "")
        tab.select_option('select[aria-label="kind of failure"]', "rejected")
        expect(tab.locator("main")).to_contain_text("No failure matches.")
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
            playwright.expect(tab.locator("#run-list label")).to_have_count(2)
            assert "stopped" in tab.inner_text("#runs")
            tab.fill('input[aria-label="filter runs"]', "BOB stop")
            playwright.expect(tab.locator("#run-list label")).to_have_count(1)
            tab.click("#run-list button")
            playwright.expect(tab.locator("#title")).to_have_text("sums/bob")
            tab.goto(f"{tab.url.partition('#')[0]}#sums%2Fbob")
            tab.reload()
            playwright.expect(tab.locator("#title")).to_have_text("sums/bob")
            assert [] == complaints
        with opened(url.partition("?")[0], viewport={"width": 390, "height": 800}) as (tab, complaints):
            tab.fill("input[name=key]", issued.stdout.strip())
            tab.click("button")
            playwright.expect(tab.locator("#title")).to_have_text("sums/ada")
            playwright.expect(tab.locator("#run-list label")).to_have_count(1)
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
