"""The page of the documentation that shows the table, written from its numbers alone."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path

from areal_actors.cache.export import STYLES
from areal_actors.cache.rewards import RULES, Unrewarded
from areal_actors.training.config import Aggregation, Normalisation, StatisticsUnit
from areal_actors_testing.gradients import SHAPES, Bias
from tools.credit.jobs import RESULTS, read_results
from tools.gradients.rules import SYSTEMS
from tools.gradients.table import DEFAULT, Question, Table, estimators

__all__ = ["PAGE", "format_page"]

PAGE = Path(__file__).parents[2] / "docs" / "results" / "gradients.md"

_KEY_SHAPES = (
    "one chain, four rewards",
    "sub-agent decides",
    "compaction",
    "attempts",
    "the policy stops",
    "graded attempts",
)
_LENGTH_SHAPES = ("long answers win", "cut answers", "the policy stops", "sub-agent when wanted", "two problems")
_BRANCH_SHAPES = ("one chain", "asked again", "branches", "graded branches", "sub-agent decides", "compaction")

_INTRODUCTION = """\
# How biased is each estimator?

Policy-gradient training moves the weights along an estimate of the gradient of the expected reward. With several
conversations in an episode, with branches, or with episodes of different lengths, most published estimators point
elsewhere. This page lists where each of them points: {num_cells:,} cells, computed exactly.

Each cell takes a small agent with countable episodes (two or three turns with two or three answers each), enumerates
every group of episodes with its probability, runs the library's own export, advantages and weights on it, and adds up
the updates. The result is compared with the true gradient of the expected reward. Nothing is sampled and nothing is
approximated. The page and its [numbers](gradients.json) are written by `nox -s gradients`, which fails if a default
is biased.

```python
from areal_actors_testing.gradients import SHAPES, Estimator, measure

bias = measure(SHAPES["sub-agent decides"], Estimator(), group_size=4)
assert bias.is_right and bias.angle < 0.1
```

An advantage function of your own is measured in the same way (`Estimator(rule=my_rule)`), and so is an agent of
another shape (`Shape`).

**How to read a cell.** `+1.00` is the scale: the length of the expected update along the true gradient, where 1 is
the gradient itself. A constant scale acts like another learning rate and does no harm. An angle behind it (`+0.84
∠15°`) is a bias: the expected update points that far away from the gradient. **Bold** cells have a negative scale:
they train the wrong way. `0` is an estimator without any expected update.

Groups have four members unless a column says otherwise. Batches are so large that their numbers of tokens, rows and
episodes are constant, but for the table of batches below.
"""


def format_page(table: Table) -> str:
    """The page in Markdown."""
    parts = [
        _INTRODUCTION.format(num_cells=sum(map(len, table.values()))),
        _defaults(table),
        _normalisations(table),
        _aggregations(table),
        _rules(table),
        _systems(table),
        _jobs(),
        _shapes(),
    ]
    return "\n".join(filter(None, parts))


def _defaults(table: Table) -> str:
    rows = [
        [
            shape.name + (" ¹" if shape.note else ""),
            *(_cell(_find(table, shape.name, DEFAULT, size)) for size in (2, 4, 8)),
            _noise(_find(table, shape.name, DEFAULT)),
        ]
        for shape in SHAPES.values()
    ]
    return f"""\
## The defaults

A configuration that says nothing about advantages, aggregation and rewards, in groups of 2, 4 and 8:

{_format_table(["Shape", "2", "4", "8", "noise"], rows)}

¹ Another quantity than the gradient of the total reward is asked for, or the policy chooses which episodes are
trained; see [the shapes](#the-shapes). The noise is the standard deviation of the update of one group of 4, over the
expected update.
"""


def _normalisations(table: Table) -> str:
    names = [f"{normalisation} / {unit}" for normalisation in Normalisation for unit in StatisticsUnit]
    return f"""\
## Normalisation and unit

`trainer.advantages.normalisation` and `unit`. The last column is the shape that fares worst, of those without a note.

{_compare(table, names, _KEY_SHAPES, has_worst=True)}

Where these biases come from:

* **Dividing by the standard deviation of the group** (`grpo`): it depends on the member's own reward, so that the
  update turns where rewards take more than two values; and it weights problems by how uncertain they are. Two rewards
  and one problem only change the scale.
* **A mean that contains the member itself** (`grpo`, `dr_grpo`): the scale is 1 - 1/n where all turns return the
  same, and the direction changes where they do not.
* **Unlike values in one mean** (`row`, and `episode` where turns return different things): a turn is compared with
  returns that its own answer has changed.
* **Turns that are alone** (`turn_depth`): what few members reach is trained less.
* **Statistics of the batch** (`reinforce_plus_plus`, `group_mean_batch_std`): here the batch is one group, the worst
  case.
* **No baseline** (`none`) is right in expectation, with the most noise.
"""


def _aggregations(table: Table) -> str:
    names = [f"aggregation: {aggregation}" for aggregation in Aggregation]
    batches = [name for name in estimators() if name.startswith("batch of")]
    return f"""\
## Aggregation

`trainer.objective.aggregation` and `masks_truncated`, with the default advantages, in batches of many groups. A mean
per row, episode or group gives a token of a short one more weight. `masks_truncated` keeps what was cut from being
unlearnt.

{_compare(table, [*names, "masks_truncated"], _LENGTH_SHAPES, has_worst=True)}

`token_mean` divides by the number of tokens in the batch, which depends on the answers. In a small batch that is a
bias as well, and it vanishes with the number of groups. `episode_sum` divides by the number of episodes, which does
not:

{_compare(table, batches, _LENGTH_SHAPES)}
"""


def _rules(table: Table) -> str:
    rules = [f"reward_rule: {rule}" for rule in RULES]
    styles = [f"export_style: {style}" for style in STYLES]
    discounted = [
        [
            f"{key.shape}, {key.discount:g}",
            *(_cell(table[key.key][name]) for name in (DEFAULT, "grpo / episode", "rloo / episode")),
        ]
        for key in map(Question.parse, table)
        if key.discount < 1
    ]
    settings = [f"unrewarded: {unrewarded}" for unrewarded in Unrewarded]
    return f"""\
## Rewards

`rollout.openai.reward_rule`, `unrewarded` and `export_style`, otherwise the defaults. How rows are cut changes
nothing.

{_compare(table, [*rules, *settings, *styles], _BRANCH_SHAPES, has_worst=True)}

`turn_discount` below 1 asks for another gradient on purpose, in which early turns count less:

{_format_table(["Shape and discount", "default", "`grpo`, `episode`", "`rloo`, `episode`"], discounted)}
"""


def _systems(table: Table) -> str:
    return f"""\
## The rules of other systems

By their formulas, with the default aggregation: the reward in the conversation of the last answer alone; a running
return against the order of requests, normalised over rows (AReaL); the episode's advantage on every token (prime-rl,
Tinker, and by standard deviation verl and TRL); the k-th answers of all members compared with one another.

{_compare(table, [f"other: {name}" for name in SYSTEMS], _KEY_SHAPES, has_worst=True)}
"""


def _jobs() -> str:
    if not RESULTS.exists():
        return ""
    rows = [
        [
            name,
            f"{sum(outcome.before for outcome in outcomes) / len(outcomes):.2f}",
            *(f"{outcome.after:.2f}" for outcome in outcomes),
            f"{contrast.after:.2f}",
        ]
        for name, (outcomes, contrast) in read_results().items()
    ]
    seeds = [f"seed {number}" for number in range(1, len(rows[0]) - 2)]
    return f"""\
## End to end

The same in training: random weights learn to write digits, through the real proxy and trainer. The first job is one
conversation of one answer; the others have one and a half times as many steps and reach 0.95 of its reward, on three
seeds (`nox -s credit`). The last column is `normalisation: grpo`, `unit: episode` and `unrewarded: zero`, one seed.

{_format_table(["Agent", "before", *seeds, "last answer alone"], rows)}
"""


def _shapes() -> str:
    rows = [[shape.name, shape.statement, shape.note or ""] for shape in SHAPES.values()]
    return f"## The shapes\n\n{_format_table(['Shape', 'The agent', 'Note'], rows)}\n"


def _compare(table: Table, names: Iterable[str], shapes: Sequence[str], *, has_worst: bool = False) -> str:
    head = ["", *shapes, *(["worst"] if has_worst else [])]
    rows = []
    for name in names:
        cells = [_cell(_find(table, shape, name)) for shape in shapes]
        rows.append([_label(name), *cells, *([_worst(table, name)] if has_worst else [])])
    return _format_table(head, rows)


def _label(name: str) -> str:
    """The setting's value, with the number of groups behind it where it matters."""
    head, _, value = name.rpartition(": ")
    value = "`" + value.replace(" / ", "` / `") + "`"
    return f"{value}, {head}" if head.startswith("batch of") else value


def _worst(table: Table, name: str) -> str:
    found = [
        (table[key.key][name], key.shape)
        for key in map(Question.parse, table)
        if key.discount == 1 and key.group_size == 4 and SHAPES[key.shape].note is None
    ]
    bias, shape = min(found, key=lambda pair: (round(pair[0].cosine, 5), pair[0].scale))
    return "" if bias.is_right else f"{_cell(bias)} ({shape})"


def _find(table: Table, shape: str, name: str, size: int = 4) -> Bias | None:
    return table.get(Question(shape=shape, group_size=size).key, {}).get(name)


def _cell(bias: Bias | None) -> str:
    if bias is None:
        return ""
    if bias.cosine == 0 or abs(bias.scale) < 0.0005:
        return "0" if bias.cosine in (0.0, 1.0, -1.0) else f"0 ∠{bias.angle:.0f}°"
    if bias.scale < 0:
        return f"**{bias.scale:+.2f}**" + ("" if bias.cosine < -0.999999 else f" ∠{bias.angle:.0f}°")
    return f"{bias.scale:+.2f}" + (
        "" if bias.is_right else f" ∠{bias.angle:.1f}°" if bias.angle < 9.5 else f" ∠{bias.angle:.0f}°"
    )


def _noise(bias: Bias | None) -> str:
    return "" if bias is None else f"{bias.noise:.1f}"


def _format_table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)
