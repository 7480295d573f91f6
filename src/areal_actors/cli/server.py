"""``areal-actors server``: install inference servers in environments of their own."""

from __future__ import annotations

import os
from pathlib import Path

import click

from areal_actors.cli.explaining import explains_errors, verbose_option

__all__ = ["server"]


@click.group()
def server() -> None:
    """Install inference servers, whose packages conflict with others, in separate environments."""


@server.command()
@click.argument("backend", metavar="sglang|vllm", type=click.Choice(["sglang", "vllm"]))
@click.option(
    "--dir",
    "directory",
    type=click.Path(path_type=Path, file_okay=False),
    help="The new environment, instead of areal_actors/servers/BACKEND in $XDG_DATA_HOME, where runs find it.",
)
@click.option(
    "--cpu/--cuda", "is_cpu", default=None, help="The build; by default, CUDA if this machine has an NVIDIA GPU."
)
@click.option("--torch-index", metavar="URL", help="An index with CPU builds of torch, for --cpu: they are smaller.")
@click.option("--pip", "is_pip", is_flag=True, help="Use pip, although uv is on the PATH.")
@click.option("--force", is_flag=True, help="Replace an environment of this command that has another version or build.")
@click.option("--dry-run", is_flag=True, help="Print the commands, and do nothing.")
@verbose_option
@explains_errors
def install(
    *,
    backend: str,
    directory: Path | None,
    is_cpu: bool | None,
    torch_index: str | None,
    is_pip: bool,
    force: bool,
    dry_run: bool,
) -> None:
    """Install SGLang or vLLM, in the version that was tried with this library, for runs that name it as their backend.

    It takes 3 GB for a CPU, and more for CUDA. uv is used if it is on the PATH, and pip otherwise; both read their own
    settings and variables, such as those of an index. Nothing is left of an installation that fails.

    \b
    Examples:
      areal-actors server install sglang
      areal-actors server install vllm --cpu --dir /opt/vllm
      areal-actors server install sglang --dry-run
    """  # noqa: D301 - a real backspace tells click to keep the lines
    from areal_actors.errors import ConfigError
    from areal_actors.generation.servers import environments
    from areal_actors.generation.servers.config import Backend

    kind = Backend(backend)
    build = (
        environments.detect_build() if is_cpu is None else environments.Build.CPU if is_cpu else environments.Build.CUDA
    )
    if torch_index is not None and build is not environments.Build.CPU:
        raise ConfigError("--torch-index is for CPU builds; torch for CUDA comes from where all else does.")
    target = (directory or environments.default_directory(kind, os.environ)).absolute()
    uv = environments.find_installer(is_pip=is_pip)
    plan = environments.create_plan(kind, build, target, uv=uv, torch_index=torch_index)
    if dry_run:
        click.echo(environments.format_plan(plan))
        return
    installed = environments.install(plan, is_forced=force, announce=lambda line: click.echo(line, err=True))
    click.echo(f"{backend} {installed.version} for {installed.build} is in {target}.")
    if directory is None:
        click.echo(f"Runs of this user find it: areal-actors train CONFIG rollout.backend={backend}")
    else:
        click.echo(f"In a configuration:\n{backend}: {{python: {installed.python}}}")
