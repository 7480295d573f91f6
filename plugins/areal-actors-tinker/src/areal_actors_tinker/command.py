"""The command ``areal-actors tinker``."""

from __future__ import annotations

import functools
from pathlib import Path

import click

from areal_actors.cli.explaining import explains_errors, verbose_option


@click.command()
@click.argument("model", default="smollm2-135m-instruct")
@click.option(
    "--name", "names", multiple=True, help="A further name of the base model for clients, such as its hub id."
)
@click.option("--host", default="127.0.0.1", show_default=True, help="Address to listen on.")
@click.option("--port", type=click.IntRange(0, 65535), default=8000, show_default=True, help="Port; 0 for a free one.")
@click.option("--fileroot", type=click.Path(path_type=Path), default=Path("tinker"), show_default=True)
@click.option("--api-key", envvar="TINKER_SERVER_KEY", help="The key that clients must send; any without one.")
@click.option(
    "--max-samplers", type=click.IntRange(1), default=4, show_default=True, help="Checkpoints with an engine."
)
@verbose_option
@explains_errors
def tinker(
    *,
    model: str,
    names: tuple[str, ...],
    host: str,
    port: int,
    fileroot: Path,
    api_key: str | None,
    max_samplers: int,
) -> None:
    """Serve MODEL to clients of Tinker's API: they create adapters, train them with their own loops, and sample.

    Agents reach every saved checkpoint by OpenAI's and Anthropic's protocols, at a second address that is printed.

    \b
    Examples:
      areal-actors tinker smollm2-135m-instruct --name HuggingFaceTB/SmolLM2-135M-Instruct
      areal-actors tinker tiny --port 8123
    """  # noqa: D301 - a real backspace tells click to keep the lines
    import anyio

    from areal_actors.lib.process_limits import raise_open_files_limit
    from areal_actors_tinker.config import TinkerConfig
    from areal_actors_tinker.server import check_access, run_server

    config = TinkerConfig(
        model=model,
        served_names=names,
        fileroot=fileroot,
        host=host,
        port=port,
        api_key=api_key,
        max_samplers=max_samplers,
    )
    check_access(config)
    raise_open_files_limit()
    click.echo(f"loading {model}", err=True)
    try:
        anyio.run(functools.partial(run_server, config, click.echo))
    except KeyboardInterrupt:
        click.echo("stopped; checkpoints are in " + str(fileroot), err=True)
