"""The report: complete, small, well-formed, and deaf to what models write into it."""

from __future__ import annotations

from html.parser import HTMLParser

import pytest

from areal_actors.dashboard import FailureWriter, MetricsWriter, RunDirectory, SessionSampler, write_report
from areal_actors.errors import RunDirectoryError
from areal_actors.messages import EvaluationFinished

VOID = {"meta", "br", "hr", "img", "link", "input"}
ATTACK = "<script>alert(1)</script><img src=x onerror=alert(2)>{{ 7 * 7 }}</pre></details>"


class Outline(HTMLParser):
    """Collects tags, attributes and text, and checks that tags close in order."""

    def __init__(self) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.attributes: set[str] = set()
        self.open: list[str] = []
        self.text = ""

    def handle_starttag(self, tag, attrs):
        self.tags.append(tag)
        self.attributes |= {name for name, _ in attrs}
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag, attrs):
        self.tags.append(tag)
        self.attributes |= {name for name, _ in attrs}

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        self.text += data


def outline(html: str) -> Outline:
    parser = Outline()
    parser.feed(html)
    parser.close()
    assert parser.open == []
    return parser


@pytest.fixture
def run(tmp_path, news, decode):
    """The files of a run of three steps with an attack in every text."""
    directory = RunDirectory(path=tmp_path / "experiment" / "trial")
    listeners = [
        MetricsWriter(directory.metrics),
        SessionSampler(directory.sessions, decode=lambda ids: decode(ids) + ATTACK),
        FailureWriter(directory.failures),
    ]
    heard = [
        EvaluationFinished(version=0, reward=0.1, num_episodes=4, num_failed=0, seconds=1.0),
        *(news.session(position, version=0, text=ATTACK) for position in range(3)),
        news.session(9, version=1, text=ATTACK, is_eval=True),
        news.session(4, version=1, failure=ATTACK),
        news.episode(4, version=1, failure=ATTACK),
        *(news.step(step, reward=0.2 * step, eval_reward=0.3 if step == 3 else None) for step in (1, 2, 3)),
    ]
    for listener in listeners:
        listener.open()
        for item in heard:
            listener.on_event(item)
        listener.close()
    directory.config.write_text(f"experiment_name: '{ATTACK}'\nproxy:\n  admin_key: very-secret-key\n")
    return directory


def test_report_is_well_formed_and_complete(run):
    """Summary, curve, steps, failures, conversations with forks, masks and reasons, configuration: all on one page."""
    html = write_report(run).read_text()
    page = outline(html)

    assert {"svg", "table", "details"} <= set(page.tags)
    for words in ("0.2 → 0.6", "0.1 → 0.3", "template rewrote history", "Not trained: cancelled", "return 0.5"):
        assert words in page.text
    for words in ("evaluations are not trained", "the episode failed", "3 tokens under version 0"):
        assert words in page.text
    assert "very-secret-key" not in html
    assert "AbCdEfGhIjKlMnOpQrStUv" not in html


def test_report_escapes_texts_of_models(run):
    """No script, handler or template of a conversation, failure or configuration becomes part of the page."""
    page = outline(write_report(run).read_text())

    assert not {"script", "img", "iframe", "object"} & set(page.tags)
    assert not {name for name in page.attributes if name.startswith("on")}
    assert ATTACK in page.text


def test_report_loads_nothing(run):
    """No address of another place is loaded, and the page forbids it."""
    html = write_report(run).read_text()

    assert "default-src 'none'" in html
    assert "src=" not in html.replace("src=x onerror", "")
    assert "@import" not in html


def test_report_is_bounded_in_size(tmp_path, news, decode):
    """At most 3 MB, whatever the run holds, and the page says how many conversations were left out."""
    directory = RunDirectory(path=tmp_path / "large" / "trial")
    metrics, sampler = MetricsWriter(directory.metrics), SessionSampler(directory.sessions, decode=decode)
    metrics.open()
    sampler.open()
    for index in range(300):
        metrics.on_event(news.step(index + 1))
        sampler.on_event(news.session(index, version=index // 4, text="long " * 5000))
    metrics.close()
    sampler.close()

    assert write_report(directory).stat().st_size < 3_000_000


def test_report_is_private(tmp_path):
    """It has conversations, as sessions.jsonl has; also one that an earlier release wrote."""
    directory = RunDirectory(path=tmp_path)
    directory.metrics.write_text('{"step": 1, "version": 1, "reward": 0.25}\n')
    directory.report.touch(mode=0o644)

    assert 0o600 == write_report(directory).stat().st_mode & 0o777


def test_report_of_a_crashed_run(tmp_path):
    """A directory with half a line of metrics, and nothing else, is enough."""
    directory = RunDirectory(path=tmp_path / "crashed" / "trial")
    directory.path.mkdir(parents=True)
    directory.metrics.write_text('{"step": 1, "version": 1, "reward": 0.25}\n{"step": 2, "rew')

    page = outline(write_report(directory).read_text())
    assert "None were kept" in page.text


def test_report_of_a_directory_without_a_run_is_refused(tmp_path):
    """The message says what was looked for."""
    with pytest.raises(RunDirectoryError, match=r"holds no run: there is no metrics\.jsonl"):
        write_report(RunDirectory(path=tmp_path))
