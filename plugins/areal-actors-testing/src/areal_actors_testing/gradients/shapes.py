"""The shapes of the published table: small agents, by name. The docstring of each is its statement in the table."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from areal_actors_testing.gradients.enumeration import Play, Script, Shape, Turn

SHAPES: dict[str, Shape] = {}
"""The shapes of the table, by name."""

_LOW, _EVEN = (0.7, 0.3), (0.4, 0.6)
_MAJORITY = 2


def _shape(name: str, *, note: str | None = None, is_selected: bool = False) -> Callable[[Script], Script]:
    """Add an agent to ``SHAPES``."""

    def add(script: Script) -> Script:
        statement = script.__doc__ or ""
        SHAPES[name] = Shape(name=name, statement=statement, problems=(script,), note=note, is_selected=is_selected)
        return script

    return add


@_shape("one chain")
def one_chain(play: Play) -> float:
    """Two turns, both of which have to be right."""
    first = play.turn("first", _LOW)
    second = play.turn("second", _EVEN, after=first)
    return float(first.option and second.option)


@_shape("one chain, four rewards")
def one_chain_four_rewards(play: Play) -> float:
    """Two turns that earn 2 and 0.5."""
    first = play.turn("first", _LOW)
    second = play.turn("second", _EVEN, after=first)
    return 2.0 * first.option + 0.5 * second.option


@_shape("rewritten history")
def rewritten_history(play: Play) -> float:
    """Two turns, the second of which does not extend the tokens of the first."""
    first = play.turn("first", _LOW)
    second = play.turn("second", _EVEN, after=first, is_fork=True)
    return float(first.option or second.option)


@_shape("first turn decides")
def first_turn_decides(play: Play) -> float:
    """Three turns, of which the first decides."""
    first = play.turn("first", _LOW)
    second = play.turn("second", _EVEN, after=first)
    play.turn("third", after=second)
    return float(first.option)


@_shape("sub-agent decides")
def sub_agent_decides(play: Play) -> float:
    """A sub-agent decides; then the main agent answers in another conversation."""
    found = play.turn("sub-agent", (0.5, 0.5))
    play.turn("main", _EVEN)
    return float(found.option)


@_shape("main and sub-agent decide")
def main_and_sub_agent_decide(play: Play) -> float:
    """The main agent plans, a sub-agent works, the main agent ends its conversation."""
    plan = play.turn("plan", _EVEN, tag="main")
    found = play.turn("sub-agent", _LOW, tag="sub")
    play.turn("end", after=plan, tag="main")
    return 0.5 * plan.option + 1.0 * found.option


@_shape("sub-agent when wanted")
def sub_agent_when_wanted(play: Play) -> float:
    """The policy decides whether there is a sub-agent at all."""
    plan = play.turn("plan", _EVEN)
    found = play.turn("sub-agent", _LOW).option if plan.option else 0
    play.turn("end", after=plan)
    return 0.25 + 0.75 * found - 0.25 * plan.option


@_shape("side call")
def side_call(play: Play) -> float:
    """A call that changes nothing stands before the answer that decides."""
    play.turn("title", _EVEN)
    return float(play.turn("answer", _LOW).option)


@_shape("compaction")
def compaction(play: Play) -> float:
    """Two turns, then a summary takes their place and a third follows; two of three have to be right."""
    first = play.turn("first", _LOW)
    second = play.turn("second", _EVEN, after=first)
    third = play.turn("after", _EVEN)
    return float(first.option + second.option + third.option >= _MAJORITY)


@_shape("asked again")
def asked_again(play: Play) -> float:
    """The second question is asked twice, and only the second answer to it counts."""
    first = play.turn("first", _LOW)
    play.turn("thrown away", _EVEN, after=first)
    last = play.turn("kept", _EVEN, after=first)
    return float(first.option and last.option)


@_shape("branches")
def branches(play: Play) -> float:
    """A turn is continued twice; one number is returned, which depends on both."""
    first = play.turn("first", _LOW)
    left = play.turn("left", _EVEN, after=first)
    right = play.turn("right", _EVEN, after=first)
    return float(first.option and (left.option or right.option))


@_shape("graded branches", note="The mean over branches halves what the first turn is credited with.")
def graded_branches(play: Play) -> Mapping[Turn, float]:
    """A turn is continued twice, and each continuation has a reward."""
    first = play.turn("first", _LOW)
    left = play.turn("left", _EVEN, after=first)
    right = play.turn("right", _LOW, after=first)
    return {left: float(first.option and left.option), right: float(right.option)}


@_shape("choices")
def choices(play: Play) -> float:
    """Two choices of one request; the better one counts."""
    picked = [play.turn("choice", _LOW).option for _ in range(2)]
    return float(max(picked))


@_shape("attempts")
def attempts(play: Play) -> float:
    """Two conversations; their mean counts."""
    return sum(play.turn(f"attempt {number}", _LOW).option for number in range(2)) / 2


@_shape("graded attempts")
def graded_attempts(play: Play) -> Mapping[Turn, float]:
    """Two conversations with a reward each."""
    attempts = [play.turn(f"attempt {number}", _LOW) for number in range(2)]
    return {turn: float(turn.option) for turn in attempts}


@_shape("dense rewards")
def dense_rewards(play: Play) -> Mapping[Turn, float]:
    """Two turns with a reward each."""
    first = play.turn("first", _LOW)
    second = play.turn("second", _EVEN, after=first)
    return {first: float(first.option), second: 2.0 * float(first.option == second.option)}


@_shape("rewards of two agents")
def rewards_of_two_agents(play: Play) -> Mapping[Turn, float]:
    """A sub-agent and the main agent have a reward each."""
    found = play.turn("sub-agent", _LOW)
    answer = play.turn("main", _EVEN)
    return {found: 0.5 * found.option, answer: float(answer.option)}


@_shape("rewarded if right")
def rewarded_if_right(play: Play) -> Mapping[Turn, float]:
    """Two conversations; the agent rewards the first one only where it was right."""
    first = play.turn("first", _LOW)
    second = play.turn("second", _EVEN)
    return {first: 1.0, second: float(second.option)} if first.option else {second: float(second.option)}


@_shape("the policy picks an agent")
def the_policy_picks_an_agent(play: Play) -> float:
    """The main agent picks one of two sub-agents, which decides."""
    plan = play.turn("plan", _EVEN, tag="main")
    tag = ("slow", "fast")[plan.option]
    found = play.turn(tag, _LOW if plan.option else _EVEN, tag=tag)
    return float(found.option)


@_shape(
    "outcome and a reward",
    note="A conversation in which an answer was rewarded is credited with that, and not with the outcome.",
)
def outcome_and_a_reward(play: Play) -> float:
    """A sub-agent has a reward, and the number that is returned depends on it and on the main agent."""
    found = play.turn("sub-agent", _LOW)
    play.reward(found, 0.5 * found.option)
    answer = play.turn("main", _EVEN)
    return float(found.option and answer.option)


@_shape("cut answers")
def cut_answers(play: Play) -> float:
    """One of three answers is long, is cut and earns nothing."""
    answer = play.turn("answer", (0.5, 0.3, 0.2), lengths=(2, 3, 9), cut=(2,))
    return float(answer.option == 1)


@_shape("long answers win")
def long_answers_win(play: Play) -> float:
    """What earns more is four times as long."""
    first = play.turn("first", _LOW, lengths=(2, 8))
    second = play.turn("second", _EVEN, after=first, lengths=(1, 3))
    return first.option + 0.5 * second.option


@_shape("the policy stops")
def the_policy_stops(play: Play) -> float:
    """The policy ends the episode or goes on."""
    first = play.turn("go on", _EVEN)
    if first.option == 0:
        return 0.5
    return float(play.turn("second", _LOW, after=first).option)


@_shape("members fail by chance")
def members_fail_by_chance(play: Play) -> float:
    """A quarter of the episodes fails, whatever the policy does."""
    found = play.turn("first", _LOW)
    if play.chance((0.75, 0.25)):
        play.fail()
        return 0.0
    play.turn("main", _EVEN)
    return float(found.option)


@_shape(
    "members fail by choice",
    note="A failed episode is in no statistic, so that what fails is not learnt to be avoided.",
    is_selected=True,
)
def members_fail_by_choice(play: Play) -> float:
    """One of three answers makes the episode fail, which trains nothing."""
    first = play.turn("first", (0.2, 0.5, 0.3))
    if not first.option:
        play.fail()
        return 0.0
    return float(first.option - 1)


def _easy(play: Play) -> float:
    return float(play.turn("easy", (0.1, 0.9)).option)


def _hard(play: Play) -> float:
    return float(play.turn("hard", _EVEN).option)


SHAPES["two problems"] = Shape(
    name="two problems", statement="One is solved nine times in ten, the other six.", problems=(_easy, _hard)
)
