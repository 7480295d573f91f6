"""Logging: structured events through the standard library's loggers, with secrets redacted before anything is written.

The rest of the library only uses ``get_logger``. Without further set-up, events go to the handlers that the embedding
program has configured for the logger ``areal_actors``, as ``event key=value`` lines. The command line opens two scopes
around a run: ``logging_to_stream`` for people, and ``logging_to_file`` for JSON lines in the run directory. Metrics of
a run are not logged; they are messages to ``Progress``.

A session id is a capability, because knowing its URL suffices to use it, and an API key is a secret. Both are shortened
to a prefix that still distinguishes sessions.
"""

from __future__ import annotations

import json
import logging
import re
import sys
import threading
import warnings
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from datetime import UTC, datetime
from logging.handlers import RotatingFileHandler
from pathlib import Path
from typing import TYPE_CHECKING, Any, TextIO, cast

# structlog is imported by the first record: its import takes as long as that of the whole kernel, and the embedded
# engine and the trainer run without it.
if TYPE_CHECKING:
    from structlog.stdlib import BoundLogger
    from structlog.typing import EventDict, WrappedLogger

_QUIET = (
    "hypercorn",
    "uvicorn",
    "httpx",
    "httpx2",
    "httpcore",
    "openai",
    "transformers",
    "PIL",
    "urllib3",
    "asyncio",
)
"""Loggers of other libraries whose records below warnings concern only themselves."""

_EVENT = "areal_event"
"""Attribute of a log record that carries the structured event in addition to the text."""

_SECRET_KEYS = frozenset(
    {
        "api_key",
        "admin_key",
        "completion_key",
        "role_keys",
        "session_key",
        "authorization",
        "x-api-key",
        "password",
        "secret",
    }
)
_SESSION_KEYS = frozenset({"session", "session_id"})
_SECRET_SETTING = re.compile(
    rf"(?im)((?:^|[{{,])\s*(?:{'|'.join(sorted(_SECRET_KEYS))}):[ \t]*['\"]?)((?!null\b)[^\s'\"]+)"
)
_NUM_SHOWN = 4
"""Characters of a random token that are shown: enough to distinguish sessions, too few to guess the rest."""

_TOKEN = r"[A-Za-z0-9_-]{22}"  # noqa: S105 - the shape of ``secrets.token_urlsafe(16)``
_PROCESS = r"(?:\.\d{1,3})?"
"""The number of a process at the end of a session's id; it may be shown."""
_SESSION_TOKEN = re.compile(rf"{_TOKEN}(?={_PROCESS}$)")
_PATTERNS = (
    re.compile(rf"(?<=sk-)()({_TOKEN}[A-Za-z0-9_-]*)"),
    re.compile(r"(?i)(?<=bearer )()((?!<)\S{5,})"),  # messages write <key> for a key
    re.compile(rf"(?<=://)([^/\s]+/(?:[A-Za-z0-9._-]*-)?)({_TOKEN})(?={_PROCESS}(?:/(?:v1|rl)\b|[\s'\")]|$))"),
    re.compile(rf"(?i)(?<=\bsession )([A-Za-z0-9._-]*?)({_TOKEN})(?![A-Za-z0-9_-])"),
)


def get_logger(name: str) -> BoundLogger:
    """Return the logger of a module: ``get_logger(__name__).info("episode_failed", session=..., reason=...)``.

    Events are names that can be searched for; facts go into keyword arguments.
    """
    # Loggers of plug-ins, such as areal_actors_service.launcher, are below ours and have their level.
    plugin = name.removeprefix("areal_actors_")
    return cast("BoundLogger", _LazyLogger(name if plugin == name else f"areal_actors.{plugin}"))


def load_logging() -> None:
    """Import structlog, which otherwise happens at the first record that is written."""
    import structlog  # noqa: F401 - for its import only


class _LazyLogger:
    """Creates the structlog logger of a module when it is first used."""

    def __init__(self, name: str) -> None:
        self._name = name

    def __getattr__(self, attribute: str) -> Any:
        import structlog

        logger = structlog.wrap_logger(
            logging.getLogger(self._name),
            processors=[
                structlog.stdlib.filter_by_level,
                structlog.stdlib.add_logger_name,
                structlog.stdlib.add_log_level,
                structlog.stdlib.PositionalArgumentsFormatter(),
                structlog.processors.TimeStamper(fmt="iso", utc=True),
                structlog.processors.format_exc_info,
                _redact_event,
                _to_record,
            ],
            wrapper_class=structlog.stdlib.BoundLogger,
            cache_logger_on_first_use=True,
        )
        value = getattr(logger, attribute)
        # Found on the instance from now on, so that this method is called once for ``info``, once for ``warning``.
        setattr(self, attribute, value)
        return value


def redact(text: str, *, session: str | None = None) -> str:
    """Return ``text`` with API keys, bearer tokens and the secret part of session ids shortened to a prefix.

    An id that is not part of a URL or of a log line looks like any word, so that of a known ``session`` is looked for.
    """
    if session is not None and (token := _SESSION_TOKEN.search(session)) is not None:
        text = text.replace(session, session.replace(token[0], _abbreviate(token[0])))
    for pattern in _PATTERNS:
        text = pattern.sub(lambda match: match[1] + _abbreviate(match[2]), text)
    return text


def kind_of(text: str) -> str:
    """Return ``text`` with numbers, ids and keys masked, so that messages which differ in these alone are equal."""
    # An id has a digit, or was shortened.
    return re.sub(r"[\w.-]*(?:\d|…)[\w….-]*", "#", redact(text))


def redact_settings(text: str) -> str:
    """Return YAML ``text`` with the values of keys and passwords shortened to a prefix."""
    return _SECRET_SETTING.sub(lambda match: match[1] + _abbreviate(match[2]), redact(text))


def _abbreviate(secret: str) -> str:
    return secret[:_NUM_SHOWN] + "…"


def _redact_event(logger: WrappedLogger, name: str, event: EventDict) -> EventDict:  # noqa: ARG001
    return {key: _redact_value(key, value) for key, value in event.items()}


def _redact_value(key: str, value: object) -> Any:
    if key.lower() in _SECRET_KEYS:
        return _abbreviate(str(value)) if value else value
    if key in _SESSION_KEYS and isinstance(value, str):
        return _SESSION_TOKEN.sub(lambda match: _abbreviate(match[0]), value)
    if isinstance(value, str):
        return redact(value)
    if isinstance(value, Mapping):
        return {inner: _redact_value(str(inner), item) for inner, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_redact_value(key, item) for item in value]
    return value


def _to_record(logger: WrappedLogger, name: str, event: EventDict) -> tuple[tuple[str], dict[str, Any]]:  # noqa: ARG001
    """Return the text for readers of log records, and the event itself for the formatters below."""
    facts = (f"{key}={value}" for key, value in event.items() if key not in {"event", "level", "logger", "timestamp"})
    return (" ".join((str(event.get("event", "")), *facts)),), {"extra": {_EVENT: event}}


# ---------------------------------------------------------------------------------------------------- set-up


@contextmanager
def logging_to_stream(stream: TextIO | None = None, *, level: int = logging.INFO) -> Iterator[None]:
    """Write log records to ``stream`` (standard error) for people while the block lasts, in colour on a terminal.

    Records of other libraries below warnings are left out. Afterwards, the previous configuration is restored.
    """
    handler = _CurrentStderr() if stream is None else logging.StreamHandler(stream)
    handler.setFormatter(_PeopleFormatter(has_colors=(stream or sys.stderr).isatty()))
    with _handling(handler, level):
        yield


@contextmanager
def logging_to_file(path: Path, *, level: int = logging.INFO, max_bytes: int = 64 * 2**20) -> Iterator[None]:
    """Append log records to ``path`` as JSON lines while the block lasts. Raises ``OSError`` if it cannot be opened.

    A file of ``max_bytes`` is renamed to ``<name>.1``, which replaces the one before, so that a service that logs each
    request fills no disk. If the disk is full later, records are lost, without further errors.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    handler = _LossyFile(path, encoding="utf-8", maxBytes=max_bytes, backupCount=1)
    handler.setFormatter(_JsonFormatter())
    with _handling(handler, level):
        yield


class _LossyFile(RotatingFileHandler):
    """A file handler that reports once that it cannot write.

    The standard handler would print a traceback for each record, and raise an error when it is closed.
    """

    _has_complained = False

    def handleError(self, record: logging.LogRecord) -> None:  # noqa: N802 - the name is given by logging
        error = sys.exc_info()[1]
        if not isinstance(error, OSError):
            super().handleError(record)
        elif not self._has_complained:
            self._has_complained = True
            print(f"{self.baseFilename} cannot be written: {error.strerror}", file=sys.stderr)  # noqa: T201 - no log can

    def close(self) -> None:
        with suppress(OSError):
            super().close()


class _CurrentStderr(logging.StreamHandler[TextIO]):
    """Writes to the current value of ``sys.stderr``, which a live display replaces."""

    def emit(self, record: logging.LogRecord) -> None:
        self.stream = sys.stderr
        super().emit(record)


class _PeopleFormatter(logging.Formatter):
    """Formats one line per record, as ``structlog`` prints them."""

    def __init__(self, *, has_colors: bool) -> None:
        import structlog

        super().__init__()
        self._render = structlog.dev.ConsoleRenderer(
            colors=has_colors, pad_event_to=0, exception_formatter=structlog.dev.plain_traceback
        )

    def format(self, record: logging.LogRecord) -> str:
        event = _event_of(record)
        event.pop("timestamp", None)
        return str(self._render(None, record.levelname, event))


class _JsonFormatter(logging.Formatter):
    """Formats one JSON object per record."""

    def format(self, record: logging.LogRecord) -> str:
        return json.dumps(_event_of(record), default=str, ensure_ascii=False)


def _event_of(record: logging.LogRecord) -> dict[str, Any]:
    """Return the structured event of ``record``; records of other libraries are converted to one."""
    event = getattr(record, _EVENT, None)
    if event is not None:
        return dict(event)
    made = {"event": redact(record.getMessage()), "level": record.levelname.lower(), "logger": record.name}
    made["timestamp"] = datetime.fromtimestamp(record.created, tz=UTC).isoformat()
    if record.exc_info:
        made["exception"] = redact(logging.Formatter().formatException(record.exc_info))
    return made


@contextmanager
def _handling(handler: logging.Handler, level: int) -> Iterator[None]:
    """Attach ``handler`` to the root logger, and let our events through to it."""
    handler.setLevel(level)
    with ExitStack() as undo:
        undo.callback(handler.close)
        _set_level(undo, "areal_actors", level)
        for name in _QUIET:
            _set_level(undo, name, logging.WARNING)
        logging.getLogger().addHandler(handler)
        undo.callback(logging.getLogger().removeHandler, handler)
        yield


def _set_level(undo: ExitStack, name: str, level: int) -> None:
    """Set a level until ``undo``; nested scopes can only let more records through."""
    logger = logging.getLogger(name)
    undo.callback(logger.setLevel, logger.level)
    logger.setLevel(min(level, logger.level) if logger.level else level)


_transformers_lock = threading.RLock()


@contextmanager
def quiet_transformers() -> Iterator[None]:
    """Suppress log lines, warnings and progress bars of transformers in the block, for one thread at a time.

    While it loads a model, transformers replaces functions of torch and of itself for the whole process. If two threads
    do so at once, each restores the other's replacements, and all models loaded later are wrong.
    """
    with _transformers_lock:
        from transformers import utils

        log: Any = utils.logging
        verbosity, has_bars = log.get_verbosity(), log.is_progress_bar_enabled()
        log.set_verbosity(logging.CRITICAL)
        log.disable_progress_bar()
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                yield
        finally:
            log.set_verbosity(verbosity)
            if has_bars:
                log.enable_progress_bar()
