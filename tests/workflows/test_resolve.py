"""From a name to an agent: every way to write one, and what is said about each mistake."""

from __future__ import annotations

import functools
from pathlib import Path
from textwrap import dedent

import pytest

from areal_actors.errors import WorkflowError
from areal_actors.lib.references import import_reference
from areal_actors.workflows import resolve_agent


class Greeter:
    """An agent with a setting."""

    def __init__(self, greeting: str = "hello") -> None:
        if not greeting:
            raise ValueError("a greeting has words")
        self.greeting = greeting

    async def run(self, data, **extra_kwargs):
        return 1.0


class Mute:
    """No agent."""


class Hasty:
    """An agent that forgot to be async."""

    def run(self, data, **extra_kwargs):
        return 1.0


@pytest.fixture
def module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A file with an agent, which is also an importable module."""
    path = tmp_path / "greeting_agent.py"
    path.write_text(
        dedent("""
            class Box:
                class Inner:
                    async def run(self, data, **extra_kwargs): return 0.0

            class Agent(Box.Inner):
                def __init__(self, size=1): self.size = size

            ready = Agent(7)
            number = 3
        """)
    )
    monkeypatch.syspath_prepend(tmp_path)
    return path


def test_instance_and_a_class_are_agents():
    """A class is called with the keyword arguments."""
    greeter = Greeter()

    assert greeter is resolve_agent(greeter)
    assert "hello" == resolve_agent(Greeter).greeting
    assert "hi" == resolve_agent(Greeter, workflow_kwargs={"greeting": "hi"}).greeting


@pytest.mark.parametrize("reference", ["greeting_agent.Agent", "greeting_agent:Agent", "greeting_agent.py:Agent"])
def test_reference_names_a_class(module: Path, reference: str):
    """Dotted, with a colon, or by file, relative to the configuration."""
    agent = resolve_agent(reference, workflow_kwargs={"size": 3}, directory=module.parent)

    assert 3 == agent.size


@pytest.mark.parametrize("reference", ["greeting_agent:ready", "{}:ready", "{}:Box.Inner"])
def test_reference_may_name_an_instance_or_something_inside(module: Path, reference: str):
    """By the absolute path of the file as well."""
    assert resolve_agent(reference.format(module)).run


def test_file_is_imported_once_and_two_files_of_one_name_are_two_modules(module: Path, tmp_path: Path):
    """All references to a file share its module; files with the same name do not."""
    other = tmp_path / "other" / module.name
    other.parent.mkdir()
    other.write_text("ready = 1")

    assert import_reference(f"{module}:ready") is import_reference("greeting_agent.py:ready", directory=tmp_path)
    assert 1 == import_reference(f"{other}:ready")


@pytest.mark.parametrize(
    ("workflow", "kwargs", "complaint"),
    [
        (Greeter(), {"greeting": "hi"}, r"workflow_kwargs \['greeting'\] were given with Greeter"),
        (Greeter, {"gretting": "hi"}, r"Greeter\(gretting\) does not fit"),
        (Greeter, {"greeting": ""}, r"Greeter\(greeting\) raised ValueError: a greeting has words"),
        (Mute, {}, "no method 'run'"),
        (Hasty(), {}, "not 'async def'"),
        (lambda data: 1.0, {}, "no method 'run'"),
        ("Agent", {}, "names nothing"),
        ("greeting_agent.py", {}, r"names a file; say what in it: 'greeting_agent.py:Class'"),
        ("missing.py:Agent", {}, "There is no file .*missing.py"),
        ("no_such_package.Agent", {}, "Cannot import no_such_package: .*PYTHONPATH"),
        ("greeting_agent:Agnet", {}, "has no 'Agnet'; it has: Agent, Box, number, ready"),
        ("greeting_agent:Box.Outer", {}, "has no 'Box.Outer'"),
        ("greeting_agent:number", {}, "'greeting_agent:number' has no method 'run'"),
        (":Agent", {}, "names nothing"),
        ("greeting_agent:", {}, "names nothing"),
    ],
)
def test_resolve_names_each_mistake(module: Path, workflow: object, kwargs: dict, complaint: str):
    """What was found instead, and what to write."""
    with pytest.raises(WorkflowError, match=complaint):
        resolve_agent(workflow, workflow_kwargs=kwargs, directory=module.parent)


@pytest.mark.parametrize("text", ["1/0", "import no_such_thing", "def (", "import sys; sys.exit(3)"])
def test_module_that_cannot_be_imported_says_why_and_can_be_tried_again(tmp_path: Path, text: str):
    """Half a module is not kept: after the mistake is mended, the import works."""
    path = tmp_path / "broken.py"
    path.write_text(text)
    with pytest.raises(WorkflowError, match=r"Importing .*broken.py raised \w+"):
        import_reference(f"{path}:ready")
    path.write_text("ready = 1")

    assert 1 == import_reference(f"{path}:ready")


def test_wrapped_coroutine_function_is_one():
    """``functools.partial`` hides nothing."""
    agent = Greeter()
    agent.run = functools.partial(agent.run, extra=1)

    assert agent is resolve_agent(agent)
