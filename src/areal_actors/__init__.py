"""Train the model behind any agent. The shop window: names only; importing it loads neither torch nor starlette."""

from __future__ import annotations

__version__ = "0.1.0"
