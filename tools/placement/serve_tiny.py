"""A server in the place of SGLang: a program that takes its arguments and serves the model by the embedded engine."""

from __future__ import annotations

import argparse
from pathlib import Path

import anyio

from areal_actors.generation.torch import TorchEngine, TorchEngineConfig
from areal_actors_testing.sglang_server import open_sglang_server


async def serve(model: Path, port: int) -> None:
    config = TorchEngineConfig(dtype="float32", device="cpu", max_concurrent=64, max_length=256)
    async with (
        TorchEngine.open(config, model=model) as engine,
        open_sglang_server(engine, model=model, port=port, is_incremental=True),
    ):
        await anyio.sleep_forever()


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--model-path", type=Path, required=True)
    parser.add_argument("--host", required=True)
    parser.add_argument("--port", type=int, required=True)
    options = parser.parse_args()
    anyio.run(serve, options.model_path, options.port)


if __name__ == "__main__":
    main()
