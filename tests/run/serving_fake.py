"""What a run starts in the place of SGLang: the small server of ``testing``, over the embedded engine."""

from __future__ import annotations

import argparse
from pathlib import Path

import anyio

from areal_actors.generation.torch import TorchEngine, TorchEngineConfig
from areal_actors_testing.sglang_server import open_sglang_server


async def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--model-path", type=Path)
    parser.add_argument("--host")
    parser.add_argument("--port", type=int)
    options = parser.parse_args()
    config = TorchEngineConfig(dtype="float32", device="cpu", max_concurrent=8, max_length=256)
    async with (
        TorchEngine.open(config, model=options.model_path) as engine,
        open_sglang_server(engine, model=options.model_path, port=options.port) as server,
    ):
        print(server.url, flush=True)  # noqa: T201 - in the log
        await anyio.sleep_forever()


if __name__ == "__main__":
    anyio.run(main)
