"""Pictures of the page of runs in a real browser, its load times, and what axe finds: ``python -m tools.screenshots``.

Writes recorded runs below ``--root``: one run with conversations, 12 runs of four learning rates with three seeds each,
41 runs, and one of 5,000 steps. Opens each in Chromium at three widths in both colour schemes, and prints how long it
took until the first chart was drawn. It ends with an error if axe has a finding of any level.
"""

from __future__ import annotations

import argparse
import random
import shutil
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from datetime import UTC, datetime
from itertools import product
from pathlib import Path
from typing import Any

import anyio
from attrs import frozen

from areal_actors.config import create_config, save_config
from areal_actors.dashboard import MetricsWriter, RunDirectory, write_report
from areal_actors.dashboard.records import RecordFile, append_lines, format_record
from areal_actors.dashboard.run_record import RunRecord, write_record
from areal_actors.domain import RunStatus
from areal_actors.messages import StepFinished
from areal_actors.viewer import find_runs, open_page

WIDTHS = {1440: 900, 768: 1024, 390: 844}
SCHEMES = ("light", "dark")
_AGENT = "agent.py:Agent"
_EXAMPLES = [
    {
        "role": "system",
        "content": "You solve word problems. Call `calculate` for every sum, then answer with a number.",
    },
    {"role": "user", "content": "A shelf holds 4 boxes of 12 pens. How many pens are there?"},
    {"role": "assistant", "content": "", "tool_calls": [{"name": "calculate", "arguments": '{"sum": "4 * 12"}'}]},
    {"role": "tool", "content": "48"},
    {"role": "assistant", "content": "48"},
]


def write_run(path: Path, *, num_steps: int, seed: int, learning_rate: float = 1e-3, total_steps: int = 60) -> None:
    """Write the settings, the metrics and the end of a run whose reward climbs, faster with a higher rate."""
    draw, directory = random.Random(path.name), RunDirectory(path=path)
    path.mkdir(parents=True)
    directory.logs.mkdir()
    settings = {
        "experiment_name": path.parent.name,
        "trial_name": path.name,
        "total_steps": total_steps,
        "model": "smollm2",
        "seed": seed,
        "dataset": {"python": "problems.py:problems"},
        "rollout": {"workflow": _AGENT},
        "trainer": {"optimizer": {"learning_rate": learning_rate}},
    }
    save_config(create_config(settings, directory=Path("/")), directory.config)
    ticks = iter(range(0, 10**9, 21))
    metrics = MetricsWriter(directory.metrics, clock=lambda: float(next(ticks)))
    metrics.open()
    for step in range(1, num_steps + 1):
        share = 1 - (1 - min(0.3, learning_rate * 60)) ** (step * 60 / total_steps / 6)
        reward = min(1.0, max(0.0, 0.05 + 0.9 * share + draw.gauss(0, 0.06)))
        length = 180 - 60 * share + draw.gauss(0, 6)
        numbers = {
            "version": step,
            "reward": round(reward, 4),
            "eval_reward": round(0.05 + 0.88 * share, 4) if step % max(1, num_steps // 8) == 0 else None,
            "loss": draw.gauss(0, 2e-3),
            "kl": abs(draw.gauss(2e-3, 1e-3)),
            "entropy": 2.2 - 1.6 * share + draw.gauss(0, 0.05),
            "staleness_mean": draw.random(),
            "staleness_max": draw.choice([1, 1, 2]),
            "tokens_per_second": draw.gauss(2400, 150),
            "sampled_tokens": int(32 * length),
            "drawn_tokens_mean": length,
            "trained_tokens_mean": length * 0.8,
            "rollout_seconds": draw.gauss(14, 1),
            "train_seconds": draw.gauss(6, 0.3),
            "groups": 8,
            "zero_variance_groups": int(2 + 5 * share * draw.random()),
            "failed_episodes": draw.choice([0, 0, 0, 1]),
            "episodes": 64,
            "grad_norm": abs(draw.gauss(0.8, 0.2)),
            "rollout/format_ok": min(1.0, 0.4 + share),
        }
        metrics.on_event(StepFinished(step=step, metrics=numbers))
    metrics.close()
    reason = "the reward's moving average reached 0.9" if num_steps < total_steps else None
    write_record(directory, RunRecord(status=RunStatus.FINISHED, reason=reason, began=datetime.now(UTC).isoformat()))


def write_conversations(directory: RunDirectory) -> None:
    """Write groups of eight samples with their tokens and advantages, two failures, and a sample with a sub-agent."""
    draw = random.Random(5)
    sessions, advantages = RecordFile(directory.sessions, is_private=True), RecordFile(directory.advantages)
    for version in range(8):
        for task in range(version * 4, version * 4 + 4):
            price, count = draw.randint(2, 9), draw.randint(3, 40)
            problem = f"A ticket costs {price} francs. What do {count} tickets cost?\nAnswer with a number."
            rewards = [float(draw.random() < 0.2 + version * 0.1) for _ in range(8)]
            mean = sum(rewards) / 8
            for sample, reward in enumerate(rewards):
                right, wrong = str(price * count), draw.choice([str(price + count), str(price * count + 1)])
                turns = list(_create_turns(draw, f"{task}-{sample}", problem, version, right if reward else wrong))
                if task % 4 == 0:
                    sessions.append(_describe(turns, version=version, task=task, sample=sample, reward=reward))
                    found = {turn["id"]: [[round(reward - mean, 3), turn["num_tokens"]]] for turn in turns}
                    advantages.append({"step": version + 1, "turns": found})
                text = "".join(token for token, _ in turns[-1]["tokens"])
                row = {"task_id": task, "sample_idx": sample, "head_version": version, "tail_version": version}
                row |= {"reward": reward, "trained": [[40, 52]], "completion": text}
                row |= {"prompt": f"<|im_start|>user\n{problem}<|im_end|>\n<|im_start|>assistant\n"}
                path = directory.rollouts / str(version) / f"{task}.jsonl"
                path.parent.mkdir(parents=True, exist_ok=True)
                append_lines(path, [format_record(row)])
    for place in (sessions, advantages):
        place.close()
    failure = {"sample_idx": 3, "is_eval": False, "turns": 1, "seconds": 2.5, "outcome": "failed"}
    reason = "ToolError: calculate: 'twelve' is not a number " + "in_a_long_name_without_a_space_" * 12
    trace = 'Traceback (most recent call last):\n  File "agent.py", line 31, in run\nToolError: no number'
    lines = [
        failure | {"task_id": str(task), "version": task // 4, "failure": reason, "traceback": trace} for task in (3, 9)
    ]
    append_lines(directory.failures, map(format_record, lines))


def _create_turns(draw: random.Random, name: str, problem: str, version: int, answer: str) -> Iterator[dict[str, Any]]:
    """Yield a tool call, a sub-agent that checks the sum, and the answer."""
    user = {"role": "user", "content": problem}
    call = f'<tool_call>\n{{"name": "calculate", "arguments": {{"sum": "{answer}"}}}}\n</tool_call><|im_end|>'
    calls = [{"name": "calculate", "arguments": f'{{"sum": "{answer}"}}'}]
    yield _create_turn(draw, [*_EXAMPLES, user], call, name=f"{name}-1", version=version, tool_calls=calls)
    tool, told = {"role": "tool", "content": answer}, f"The tickets cost {answer} francs.<|im_end|>"
    yield _create_turn(draw, [tool], told, name=f"{name}-2", parent=f"{name}-1", version=version)
    if name.endswith("-0"):
        check = [{"role": "system", "content": "Check sums."}, {"role": "user", "content": f"Is {answer} right?"}]
        yield _create_turn(draw, check, "It is.<|im_end|>", name=f"{name}-3", version=version, tag="checker")
        again = [{"role": "user", "content": "Are you sure?"}]
        parent = f"{name}-3"
        yield _create_turn(
            draw, again, "Yes.<|im_end|>", name=f"{name}-4", parent=parent, version=version, tag="checker"
        )


def _create_turn(
    draw: random.Random,
    messages: Sequence[Mapping[str, Any]],
    text: str,
    *,
    name: str,
    version: int,
    parent: str | None = None,
    tag: str | None = None,
    tool_calls: Sequence[Mapping[str, Any]] = (),
) -> dict[str, Any]:
    pieces = [text[at : at + 4] for at in range(0, len(text), 4)]
    tokens = [[piece, round(-draw.expovariate(2.0 if draw.random() < 0.9 else 0.4), 3)] for piece in pieces]
    half = len(tokens) // 2
    return {
        "id": name,
        "parent": parent,
        "token_parent": parent,
        "fork": None if parent else "root",
        "status": "completed",
        "tag": tag,
        "reward": None,
        "return": 1.0,
        "credit": "inherited",
        "failure": None,
        "messages": list(messages),
        "answer": {"role": "assistant", "content": text, "tool_calls": list(tool_calls)},
        "num_prompt_tokens": 120,
        "num_tokens": len(tokens),
        "finish": "stop",
        "tokens": tokens,
        "versions": [[version, half], [version + 1, len(tokens) - half]],
        "mask": [[1, len(tokens)]],
    }


def _describe(
    turns: Sequence[Mapping[str, Any]], *, version: int, task: int, sample: int, reward: float
) -> dict[str, Any]:
    return {
        "session": f"train-{task}-{sample}-AbCd…",
        "version": version,
        "is_eval": False,
        "task_id": str(task),
        "sample_idx": sample,
        "reward": reward,
        "logged": {"format_ok": 1.0},
        "seconds": 3.2,
        "failure": None,
        "limit": None,
        "untrained": [],
        "turns": list(turns),
        "num_turns": len(turns),
    }


@frozen(kw_only=True)
class Scene:
    """A picture: the runs that are opened, and the state that the address has."""

    name: str
    runs: str
    address: str = ""
    wait_for: str = ".chart canvas"
    click: str | None = None


_CHOSEN = "run=tickets/trial"
SCENES = (
    Scene(name="curves", runs="one", address=f"{_CHOSEN}&smooth=0.6"),
    Scene(name="conversations", runs="one", address=f"{_CHOSEN}&tab=conversations", wait_for=".turn .tokens"),
    Scene(name="failures", runs="one", address=f"{_CHOSEN}&tab=failures", wait_for=".card", click=".card summary"),
    Scene(name="settings", runs="one", address=f"{_CHOSEN}&tab=settings", wait_for="th.path"),
    Scene(name="seeds", runs="twelve", address="seeds=mean", click="text=All"),
    Scene(name="runs", runs="many", click="text=All"),
    Scene(name="long", runs="long", address="axis=time&smooth=0.9"),
)


def write_runs(root: Path) -> None:
    """Write all runs below ``root``."""
    write_run(root / "one" / "tickets" / "trial", num_steps=47, seed=1)
    write_conversations(RunDirectory(path=root / "one" / "tickets" / "trial"))
    write_report(RunDirectory(path=root / "one" / "tickets" / "trial"))
    for rate in (1e-4, 3e-4, 1e-3, 3e-3):
        for seed in (1, 2, 3):
            write_run(root / "twelve" / "rates" / f"lr{rate:g}-s{seed}", num_steps=60, seed=seed, learning_rate=rate)
    for seed in range(1, 42):
        write_run(root / "many" / "sweep" / f"run{seed}", num_steps=60, seed=seed, learning_rate=seed * 5e-5)
    write_run(root / "long" / "long" / "trial", num_steps=5000, seed=1, total_steps=5000)


def find_chromium() -> str | None:
    """Return the path of an installed Chromium; ``None`` if playwright has to use one that it downloaded."""
    return shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")


def take_pictures(root: Path, out: Path, scenes: Sequence[Scene], *, widths: Sequence[int]) -> int:
    """Take the pictures of ``scenes``, and return the number of findings."""
    from playwright.sync_api import sync_playwright

    num_findings = 0
    with sync_playwright() as started, anyio.from_thread.start_blocking_portal() as portal:
        browser = started.chromium.launch(executable_path=find_chromium(), args=["--no-sandbox"])
        for runs in dict.fromkeys(scene.runs for scene in scenes):
            with portal.wrap_async_context_manager(open_page(find_runs([root / runs]), token="shown")) as url:
                wanted = [scene for scene in scenes if scene.runs == runs]
                for scene, width, scheme in product(wanted, widths, SCHEMES):
                    size = {"width": width, "height": WIDTHS[width]}
                    tab = browser.new_context(color_scheme=scheme, viewport=size).new_page()
                    seconds, findings = _visit(tab, url, scene)
                    tab.screenshot(path=out / f"{scene.name}-{width}-{scheme}.png")
                    tab.context.close()
                    num_findings += len(findings)
                    told = "; ".join(findings) or "no finding"
                    print(f"{scene.name:14}{width:5} {scheme:6}{seconds:6.2f} s  {told}")
        report = browser.new_page()
        for path in sorted(root.glob("*/*/*/report.html")):
            report.goto(path.as_uri())
            findings = _find(report)
            num_findings += len(findings)
            print(f"{path.name:33} {'; '.join(findings) or 'no finding'}")
            report.screenshot(path=out / "report.png")
        browser.close()
    return num_findings


def _visit(tab: Any, url: str, scene: Scene) -> tuple[float, list[str]]:
    """Open a scene; return the seconds until it was drawn, and what is wrong with it."""
    tab.context.request.get(url)  # for its cookie, without loading the page
    began = time.perf_counter()
    tab.goto(f"{url.partition('?')[0]}#{scene.address}")
    tab.wait_for_selector(scene.wait_for)
    seconds = time.perf_counter() - began
    if scene.click:
        tab.click(scene.click)
    tab.wait_for_load_state("networkidle")
    return seconds, _find(tab)


def _find(tab: Any) -> list[str]:
    """Return the findings of axe, of any level, and whether the page is wider than the screen."""
    from axe_playwright_python.sync_playwright import Axe

    violations = Axe().run(tab).response["violations"]
    found = [f"{one['id']} ({one['impact']}): {one['nodes'][0]['html'][:90]}" for one in violations]
    if not tab.evaluate("document.documentElement.scrollWidth <= innerWidth"):
        found.append("wider than the screen")
    return found


def main(arguments: Sequence[str] | None = None) -> int:
    """Take the pictures that the arguments name, and return the exit status."""
    parser = argparse.ArgumentParser(prog="python -m tools.screenshots", description=__doc__.partition("\n")[0])
    parser.add_argument("--out", type=Path, default=Path("screenshots"), help="where the pictures go")
    parser.add_argument(
        "--root", type=Path, help="where the runs are, or are written; a temporary directory if not given"
    )
    parser.add_argument("--scene", action="append", choices=[scene.name for scene in SCENES], help="all if not given")
    parser.add_argument("--width", action="append", type=int, choices=WIDTHS, help="all if not given")
    options = parser.parse_args(arguments)
    options.out.mkdir(parents=True, exist_ok=True)
    scenes = [scene for scene in SCENES if options.scene is None or scene.name in options.scene]
    with tempfile.TemporaryDirectory() as temporary:
        root = options.root or Path(temporary)
        if not (root / "one").exists():
            write_runs(root)
        return min(1, take_pictures(root, options.out, scenes, widths=options.width or tuple(WIDTHS)))


if __name__ == "__main__":
    sys.exit(main())
