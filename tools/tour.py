"""Write docs/concepts/tour.md, which follows a completion, a reward and a weight update file by file. ``nox -s tour``.

The files are traced in a real server, in the order in which they are entered first; the sentences are those of their
docstrings. The picture of processes and messages is drawn from the tables below.
"""

from __future__ import annotations

import ast
import re
import sys
from collections.abc import Iterator, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any
from xml.sax.saxutils import escape

import anyio
import click
from attrs import frozen

from tools.shape import PACKAGE, Tracer, is_entry

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs" / "concepts" / "tour.md"
PICTURE = ROOT / "docs" / "images" / "processes.svg"

_MAX_NAMES = 3
"""Number of functions that the page names for each file."""
_HOP = re.compile(r"^\| \d+ \| `(?P<file>[\w/]+\.py)` \| .* \| (?P<names>.*) \|$")
_SENTENCE = re.compile(r"(?<=[.?!])\s")


@frozen
class Hop:
    """A file that a walk enters, and the first documented functions that it enters there."""

    file: str
    names: tuple[str, ...]


@frozen(kw_only=True)
class Walk:
    """One thing that happens, followed through the files."""

    title: str
    text: str
    hops: tuple[Hop, ...]


WALKS = {
    "A completion": (
        "An agent posts a chat completion to the URL of its session. The proxy parses it and asks the session manager, "
        "which finds the turn that the request continues, renders what is new and asks the generation actor; the "
        "engine samples on its own thread."
    ),
    "A reward": (
        "The agent posts a reward to `/rl/set_reward`. The session's tree keeps it; rewards are propagated when rows "
        "are built."
    ),
    "A weight update": (
        "The trainer takes a snapshot of its policy and sends `PublishWeights` to the generation actor. The engine "
        "changes its weights between two steps; running generations continue, and stamp the new version from there."
    ),
}
"""What each walk shows, by its title."""

_HEAD = """\
# The tour of the code

This page is for a new contributor. It follows one chat completion, one reward and one weight update through the source,
file by file, in the order in which the files are entered first. Run `nox -s tour` to write it again after a change: the
files are traced in a real server, and each sentence is the first one of the file's docstring.

![Processes and messages](../images/processes.svg)

Each box is an actor, named by the address that its messages are sent to; each arrow is a message, which
[`messages`](../reference/api/messages.md) defines. Dashed frames are processes where the roles of a run are
[placed](../guides/processes.md) in several; by default, all actors share one process and one event loop.
[Architecture](architecture.md) explains the parts.
"""


# ------------------------------------------------------------------------------------------------------- traces


class OrderedTracer(Tracer):
    """Collects the functions of the package in the order in which they are entered first."""

    def __init__(self) -> None:
        super().__init__()
        self._order: dict[tuple[str, str], None] = {}

    def _note(self, frame: Any, event: str, _: Any) -> None:
        if is_entry(frame, event):
            file = Path(frame.f_code.co_filename).relative_to(PACKAGE)
            self._order.setdefault((str(file), frame.f_code.co_qualname))

    def take_hops(self) -> tuple[Hop, ...]:
        """Return the files that were entered since the last time, with the functions that the page names."""
        entered, self._order = self._order, {}
        names: dict[str, list[str]] = {}
        for file, name in entered:
            names.setdefault(file, []).append(name)
        return tuple(Hop(file, tuple(name for name in found if is_shown(file, name))[:_MAX_NAMES])
                     for file, found in names.items())  # fmt: skip


async def trace() -> list[Walk]:
    """Trace the walks, each after another of its kind, so that nothing is set up meanwhile."""
    import httpx
    import transformers

    from areal_actors import open_inference
    from areal_actors.messages import PublishWeights
    from areal_actors.models import resolve_model
    from areal_actors.training.publication import MemoryPublisher

    @frozen
    class Policy:
        """Weights to publish, as the trainer has them."""

        version: int
        model: Any

        def state_dict(self) -> Mapping[str, Any]:
            return self.model.state_dict()  # type: ignore[no-any-return]

    model = transformers.AutoModelForCausalLM.from_pretrained(resolve_model("tiny").path)
    body = {"model": "policy", "messages": [{"role": "user", "content": "Name a number."}], "max_tokens": 4}
    found: list[tuple[Hop, ...]] = []
    with OrderedTracer() as tracer:
        async with open_inference("tiny") as inference, inference.session("tour") as session:
            headers = {"authorization": f"Bearer {session.api_key}"}
            async with httpx.AsyncClient(headers=headers, timeout=60) as client:
                chat = f"{session.base_url}/chat/completions"
                reward = f"{session.base_url.removesuffix('/v1')}/rl/set_reward"
                for url, document in ((chat, body), (reward, {"reward": 1.0})):
                    for _ in range(2):
                        tracer.take_hops()
                        (await client.post(url, json=document)).raise_for_status()
                    found.append(tracer.take_hops())
            for version in (1, 2):
                tracer.take_hops()
                snapshot = MemoryPublisher().publish(Policy(version, model))
                await inference.generation.ask(PublishWeights(snapshot=snapshot))
            found.append(tracer.take_hops())
    return [Walk(title=title, text=text, hops=hops) for (title, text), hops in zip(WALKS.items(), found, strict=True)]


# --------------------------------------------------------------------------------------------------------- page


@cache
def _documents(file: str) -> Mapping[str, str]:
    """Return the docstrings of a file by qualified name; ``""`` is the name of the module."""
    found: dict[str, str] = {}

    def collect(node: ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef, name: str) -> None:
        found[name] = ast.get_docstring(node) or ""
        for child in node.body:
            if isinstance(child, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
                collect(child, f"{name}.{child.name}".lstrip("."))

    collect(ast.parse((PACKAGE / file).read_text(encoding="utf-8")), "")
    return found


def is_shown(file: str, name: str) -> bool:
    """Return whether the page names a function: it has a docstring, and no part of its name is private."""
    return not any(part.startswith("_") for part in name.split(".")) and bool(_documents(file).get(name))


def sentence_of(file: str) -> str:
    """Return the first sentence of a file's docstring, in one line."""
    text = " ".join(_documents(file)[""].split("\n\n")[0].split())
    return _SENTENCE.split(text)[0].replace("``", "`").replace("|", "\\|")


def render(walks: Sequence[Walk]) -> str:
    """Return the page."""
    parts = [_HEAD]
    for walk in walks:
        parts += [f"## {walk.title}", "", walk.text, "", f"It enters {len(walk.hops)} files.", ""]
        parts += ["| | File | Subject | Begins with |", "|---|---|---|---|"]
        for number, hop in enumerate(walk.hops, start=1):
            names = ", ".join(f"`{name}`" for name in hop.names)
            parts.append(f"| {number} | `{hop.file}` | {sentence_of(hop.file)} | {names} |")
        parts.append("")
    return "\n".join(parts)


def read(page: str) -> Iterator[Walk]:
    """Yield the walks of a page."""
    for section in page.split("\n## ")[1:]:
        title = section.partition("\n")[0]
        hops = [
            Hop(found["file"], tuple(re.findall(r"`([\w.]+)`", found["names"])))
            for line in section.splitlines()
            if (found := _HOP.match(line))
        ]
        yield Walk(title=title, text=WALKS[title], hops=tuple(hops))


# ------------------------------------------------------------------------------------------------------ picture


@frozen
class Box:
    """An actor, or a party outside of the actors; ``address`` is its name in ``messages``, empty outside."""

    x: int
    y: int
    address: str
    lines: tuple[str, ...]
    is_outside: bool = False


@frozen
class Arrow:
    """Messages from one box to another, along the points between them; the label stands at ``at``."""

    points: tuple[tuple[int, int], ...]
    messages: tuple[str, ...]
    at: tuple[int, int]
    kind: str
    """``completion``, ``reward``, ``weights`` or ``rows``: the colour."""
    anchor: str = "middle"


_WIDTH, _HEIGHT = 168, 58
FRAMES = (
    (16, 60, 214, 520, "agents: any SDK, any process"),
    (246, 60, 214, 250, "proxy"),
    (476, 60, 214, 520, "sessions"),
    (706, 60, 238, 250, "generation (one for each replica)"),
    (246, 330, 214, 250, "rollouts"),
    (706, 330, 238, 250, "trainer"),
)
BOXES = (
    Box(39, 100, "", ("Agent", "run(data, base_url, …)"), is_outside=True),
    Box(269, 100, "Serving", ("Serving", "HTTP: three APIs")),
    Box(499, 100, "Sessions", ("Sessions", "trees, tokens, rewards")),
    Box(741, 100, "Generation", ("Generation", "engine, its version")),
    Box(741, 224, "", ("Engine", "thread, or servers"), is_outside=True),
    Box(269, 440, "Rollouts", ("Rollouts", "running episodes")),
    Box(499, 320, "Exports", ("Exports", "rows, finished groups")),
    Box(499, 492, "Capacity", ("Capacity", "groups that may start")),
    Box(741, 440, "Training", ("Training", "policy, optimiser, steps")),
)
ARROWS = (
    Arrow(((207, 118), (269, 118)), ("POST …/chat/completions",), (353, 90), "completion"),
    Arrow(((437, 118), (499, 118)), ("Complete", "StreamComplete"), (583, 78), "completion"),
    Arrow(((667, 118), (741, 118)), ("Generate",), (825, 90), "completion"),
    Arrow(((825, 158), (825, 224)), ("steps",), (833, 196), "completion", "start"),
    Arrow(((207, 144), (269, 144)), ("POST …/rl/set_reward",), (353, 178), "reward"),
    Arrow(((437, 140), (499, 140)), ("SetReward",), (499, 178), "reward", "start"),
    Arrow(((437, 458), (468, 458), (468, 152), (499, 152)), ("OpenSession", "EndSession"), (480, 236), "rows", "start"),
    Arrow(((583, 320), (583, 158)), ("CollectSession", "ForgetSession"), (591, 236), "rows", "start"),
    Arrow(((353, 440), (353, 349), (499, 349)), ("BeginGroup", "DeliverGroup"), (361, 372), "rows", "start"),
    Arrow(((437, 482), (468, 482), (468, 520), (499, 520)), ("AcquirePermit", "SettlePermit"), (353, 530), "rows"),
    Arrow(((269, 470), (123, 470), (123, 158)), ("calls run",), (131, 330), "rows", "start"),
    Arrow(((741, 455), (700, 455), (700, 349), (667, 349)), ("LeaseGroups", "AcknowledgeLease"), (712, 386), "rows",
          "start"),
    Arrow(((741, 484), (700, 484), (700, 520), (667, 520)), ("VersionAdvanced",), (712, 532), "weights", "start"),
    Arrow(((909, 469), (932, 469), (932, 129), (909, 129)), ("PublishWeights",), (925, 360), "weights", "end"),
)  # fmt: skip
_STYLE = """\
    .frame { fill: none; stroke: #8a93a3; stroke-dasharray: 5 4; }
    .actor { fill: #eef3fb; stroke: #3b5b92; }
    .outside { fill: #f6f2e8; stroke: #8c7a4c; }
    text { font-family: system-ui, sans-serif; font-size: 12px; fill: #1d2430; }
    .name { font-size: 14px; font-weight: 600; }
    .note, .place { fill: #5b6472; }
    .line { fill: none; stroke-width: 1.8; }
    .completion { stroke: #2f6fdb; } .reward { stroke: #c2571a; } .weights { stroke: #7a3fb0; } .rows { stroke: #26845a; }
    text.completion { fill: #2f6fdb; stroke: none; } text.reward { fill: #c2571a; stroke: none; }
    text.weights { fill: #7a3fb0; stroke: none; } text.rows { fill: #26845a; stroke: none; }
    @media (prefers-color-scheme: dark) {
      .actor { fill: #1f2a3d; stroke: #86a7e0; } .outside { fill: #2f2a1c; stroke: #c9b377; }
      text { fill: #e6eaf2; } .note, .place { fill: #a6afbf; } .frame { stroke: #6d7686; }
      .completion { stroke: #7fb0ff; } .reward { stroke: #ff9f66; } .weights { stroke: #c79cf0; } .rows { stroke: #6fd0a0; }
      text.completion { fill: #7fb0ff; } text.reward { fill: #ff9f66; }
      text.weights { fill: #c79cf0; } text.rows { fill: #6fd0a0; }
    }
"""  # noqa: E501 - one rule per line is easier to read


def draw() -> str:
    """Return the picture: SVG that follows the reader's light or dark scheme."""
    kinds = ("completion", "reward", "rows", "weights")
    head = (
        '<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 960 600" role="img" aria-label="Processes and messages">'
    )
    parts = [head, "  <style>", _STYLE.rstrip("\n"), "  </style>", "  <defs>"]
    parts += [
        f'    <marker id="{kind}" viewBox="0 0 10 10" refX="9" refY="5" markerWidth="7" markerHeight="7" '
        f'orient="auto"><path d="M1 1 9 5 1 9" class="line {kind}"/></marker>'
        for kind in kinds
    ]
    parts.append("  </defs>")
    legend = {"completion": "a completion", "reward": "a reward", "rows": "episodes and rows", "weights": "new weights"}
    for number, (kind, label) in enumerate(legend.items()):
        x = 24 + 170 * number
        parts.append(f'  <path class="line {kind}" d="M{x} 30H{x + 32}" marker-end="url(#{kind})"/>')
        parts.append(f'  <text class="{kind}" x="{x + 40}" y="34">{label}</text>')
    for x, y, width, height, name in FRAMES:
        parts.append(f'  <rect class="frame" x="{x}" y="{y}" width="{width}" height="{height}" rx="10"/>')
        parts.append(f'  <text class="place" x="{x + 10}" y="{y + height - 10}">{escape(name)}</text>')
    for box in BOXES:
        kind = "outside" if box.is_outside else "actor"
        parts.append(f'  <rect class="{kind}" x="{box.x}" y="{box.y}" width="{_WIDTH}" height="{_HEIGHT}" rx="6"/>')
        for number, line in enumerate(box.lines):
            style = "note" if number else "name"
            x, y = box.x + _WIDTH // 2, box.y + 25 + 19 * number
            parts.append(f'  <text class="{style}" text-anchor="middle" x="{x}" y="{y}">{escape(line)}</text>')
    for arrow in ARROWS:
        path = "M" + "L".join(f"{x} {y}" for x, y in arrow.points)
        parts.append(f'  <path class="line {arrow.kind}" d="{path}" marker-end="url(#{arrow.kind})"/>')
        for number, message in enumerate(arrow.messages):
            x, y = arrow.at[0], arrow.at[1] + 15 * number
            text = f'class="{arrow.kind}" text-anchor="{arrow.anchor}" x="{x}" y="{y}"'
            parts.append(f"  <text {text}>{escape(message)}</text>")
    return "\n".join([*parts, "</svg>", ""])


@click.command()
@click.option("--check", is_flag=True, help="Write nothing; fail if the traced files are not those of the page.")
def main(*, check: bool) -> None:
    """Trace the walks and write the page and its picture."""
    walks = anyio.run(trace)
    if check:
        written = {walk.title: {hop.file for hop in walk.hops} for walk in read(PAGE.read_text(encoding="utf-8"))}
        changed = {
            walk.title: sorted({hop.file for hop in walk.hops} ^ written[walk.title])
            for walk in walks
            if {hop.file for hop in walk.hops} != written[walk.title]
        }
        print(changed or "The page is current.")
        sys.exit(bool(changed))
    PAGE.write_text(render(walks), encoding="utf-8")
    PICTURE.write_text(draw(), encoding="utf-8")
    for walk in walks:
        print(f"{walk.title}: {len(walk.hops)} files")


if __name__ == "__main__":
    main()
