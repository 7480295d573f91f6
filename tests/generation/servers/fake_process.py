"""A fake SGLang server as a process, started as SGLang is: a token every 20 ms."""

from __future__ import annotations

import argparse
import os
from pathlib import Path

import anyio

from areal_actors.testing.engines import EchoEngine
from areal_actors_testing.sglang_server import open_sglang_server


def script(prompt) -> list[int]:
    """Sixty tokens that count on from the last of the prompt, so that a gap or a repetition shows."""
    return [3 + (int(prompt[-1]) - 3 + i + 1) % 300 for i in range(60)]


async def main(model: Path, port: int) -> None:
    """Serve until the process is killed; while the file ``$FAKE_HOLD`` is there, do not begin to."""
    while os.path.exists(os.environ.get("FAKE_HOLD", "")):  # noqa: ASYNC110, ASYNC240, PTH110 - a file tells
        await anyio.sleep(0.02)
    engine = EchoEngine(script, vocab_size=384, context_length=256, is_gated=True)
    async with open_sglang_server(engine, model=model, port=port, is_incremental=True):
        while True:
            await anyio.sleep(0.02)
            engine.release()


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--model-path", type=Path)
    parser.add_argument("--host")
    parser.add_argument("--port", type=int)
    options = parser.parse_args()
    anyio.run(main, options.model_path, options.port)
