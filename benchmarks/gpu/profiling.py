"""Tables of where the time of a device goes, by kernel, from torch's profiler."""

from __future__ import annotations

import json
import sys
import tempfile
import threading
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from attrs import define
from benchmarks.gpu.cells import Context, synchronise
from torch.profiler import ProfilerActivity, profile

__all__ = ["Profile", "format_kernels", "profiled", "sampled"]

_NUM_SHOWN = 30


@define
class Profile:
    """The table of a profiled block, complete after the block, which may set its ``num_steps``."""

    table: str = ""
    num_steps: float = 1


@contextmanager
def profiled(context: Context) -> Iterator[Profile]:
    """Profile the block, whose steps may run on any thread.

    Kernels are read from the trace, since torch's own table knows only the operators of the thread that it was started
    on, and the engine has another.
    """
    found = Profile()
    kinds = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if context.is_cuda else [])]
    with profile(activities=kinds) as recorded:
        yield found
        synchronise(context.device)
    with tempfile.TemporaryDirectory() as directory:
        path = Path(directory) / "trace.json"
        recorded.export_chrome_trace(str(path))
        events = json.loads(path.read_text(encoding="utf-8"))["traceEvents"]
    found.table = format_kernels(events, num_steps=found.num_steps)


@contextmanager
def sampled(thread_name: str | None = None, *, seconds: float = 0.002) -> Iterator[Profile]:
    """Sample the Python stack of the thread with this name (``None``: the caller's) while the block runs.

    A kernel launch takes 24 µs on a slow processor, so that the host decides how fast small kernels are.
    """
    threads = {thread.name: thread.ident for thread in threading.enumerate()}
    ident = threading.get_ident() if thread_name is None else threads.get(thread_name)
    found, stop = Profile(), threading.Event()
    own: Counter[str] = Counter()
    whole: Counter[str] = Counter()

    def sample() -> None:
        while not stop.wait(seconds):
            frame = sys._current_frames().get(ident or 0)  # noqa: SLF001  documented, and there is no other name
            names = []
            while frame is not None:
                code = frame.f_code
                names.append(f"{code.co_qualname} ({'/'.join(Path(code.co_filename).parts[-2:])}:{frame.f_lineno})")
                frame = frame.f_back
            own.update(names[:1])
            whole.update(set(names))

    sampler = threading.Thread(target=sample, daemon=True)
    sampler.start()
    try:
        yield found
    finally:
        stop.set()
        sampler.join()
        total = max(1, sum(own.values()))
        for title, counts in (("lines that ran", own), ("lines on the stack", whole)):
            found.table += f"{title}, of {total} samples\n"
            found.table += "".join(f"{n / total:7.1%}  {name}\n" for name, n in counts.most_common(_NUM_SHOWN))


def format_kernels(events: list[dict], *, num_steps: float) -> str:
    """Return device time and launches per step of the kernels in ``events`` of a Chrome trace, longest first."""
    kernels = [event for event in events if event.get("cat") in {"kernel", "gpu_memcpy", "gpu_memset"}]
    if not kernels:
        kernels = [event for event in events if event.get("cat") == "cpu_op"]
    if not kernels:
        return "nothing was recorded"
    seconds: Counter[str] = Counter()
    launches: Counter[str] = Counter()
    for event in kernels:
        seconds[event["name"]] += event.get("dur", 0)
        launches[event["name"]] += 1
    span = max(e["ts"] + e.get("dur", 0) for e in kernels) - min(e["ts"] for e in kernels)
    busy = sum(seconds.values())
    runtime = Counter(event["name"] for event in events if event.get("cat") in {"cuda_runtime", "cuda_driver"})
    head = (
        f"{span / num_steps / 1e3:.3f} ms per step, {busy / num_steps / 1e3:.3f} ms of it in "
        f"{sum(launches.values()) / num_steps:.0f} kernels and copies ({busy / max(span, 1):.0%} busy)"
    )
    lines = [
        head,
        "calls per step: " + ", ".join(f"{name} {count / num_steps:.1f}" for name, count in runtime.most_common(8)),
        f"{'ms/step':>9} {'share':>6} {'calls/step':>10}  kernel",
    ]
    lines += [
        f"{time / num_steps / 1e3:9.3f} {time / busy:6.1%} {launches[name] / num_steps:10.1f}  {name[:140]}"
        for name, time in seconds.most_common(_NUM_SHOWN)
    ]
    return "\n".join(lines) + "\n"
