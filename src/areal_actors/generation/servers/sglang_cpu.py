"""Start an unmodified SGLang server on a machine without a GPU, with ``torch_native`` attention.

``areal-actors server install sglang --cpu`` copies this file into the environment of the server as
``areal_sglang_cpu``, so it imports nothing of this package. SGLang imports kernels of ``sgl_kernel`` by name also where
it computes with plain torch; this file supplies the names. Nothing happens unless it is the main module. Processes that
the server spawns run it again as their main module, and get the same.
"""

import functools
import os
import sys
import types
from collections.abc import Callable
from typing import Any

__all__: list[str] = []


class _Kernels(types.ModuleType):
    """A stand-in for ``sgl_kernel`` whose functions fail when they are called, not when they are imported."""

    def __getattr__(self, name: str) -> Callable[..., Any]:
        if name.startswith("__"):
            raise AttributeError(name)

        def fail(*_: Any, **__: Any) -> Any:
            raise NotImplementedError(f"sgl_kernel.{name} is not available on a CPU")

        return fail


def _prepare() -> None:
    os.environ.setdefault("SGLANG_USE_CPU_ENGINE", "1")
    import torch
    from torch import library

    if torch.version.cuda is None:
        # torchvision is compiled against torch for CUDA: next to one for CPUs, it cannot register these schemas itself.
        operators: Any = library.Library("torchvision", "DEF")  # type: ignore[no-untyped-call]
        for name in ("nms", "qnms"):
            operators.define(f"{name}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
        _kept.append(operators)  # its schemas end with it
    kernels = _Kernels("sgl_kernel")
    kernels.__path__ = []
    sys.modules.setdefault("sgl_kernel", kernels)
    if not torch.accelerator.is_available():
        # SGLang's adapters ask for pinned memory also without an accelerator, which torch refuses.
        for name in ("tensor", "empty", "zeros", "ones", "full", "arange"):
            setattr(torch, name, _without_pinned_memory(getattr(torch, name)))
        torch.Tensor.pin_memory = lambda self, *_, **__: self  # type: ignore[method-assign]
        # And its record of experts registers memory with CUDA.
        runtime = types.SimpleNamespace(cudaHostRegister=lambda *_: 0, cudaHostUnregister=lambda *_: 0)
        torch.cuda.cudart = lambda: runtime


_kept: list[object] = []


def _without_pinned_memory(create: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(create)
    def wrapped(*arguments: Any, **options: Any) -> Any:
        options.pop("pin_memory", None)
        return create(*arguments, **options)

    return wrapped


if __name__ in {"__main__", "__mp_main__"}:
    _prepare()

if __name__ == "__main__":
    from sglang.launch_server import run_server  # pyright: ignore[reportMissingImports]
    from sglang.srt.server_args import prepare_server_args  # pyright: ignore[reportMissingImports]
    from sglang.srt.utils import kill_process_tree  # pyright: ignore[reportMissingImports]

    try:
        run_server(prepare_server_args(sys.argv[1:]))
    finally:
        kill_process_tree(os.getpid(), include_parent=False)
