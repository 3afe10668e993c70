"""Where the driver's log lines go: a file of the run, so that the terminal shows progress alone."""

import logging
from pathlib import Path

# Named loggers and not the root one, whose handlers Prefect sets anew when its first flow starts.
# `ray.init` clears the handlers of "ray", so the loggers below it need their own.
_LOGGERS = ("spotlight_core", "tasks", "flows", "ray", "ray._private", "mlflow", "alembic", "asyncio")


def log_to(path: Path) -> logging.Handler:
    """Send the driver's log lines to ``path``; returns the handler for ``stop_logging``.

    Call it after Ray is imported, which gives itself a handler.
    """
    handler = logging.FileHandler(path, encoding="utf-8")
    handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(name)s: %(message)s"))
    for name in _LOGGERS:
        logger = logging.getLogger(name)
        for other in list(logger.handlers):  # Ray's own, which writes to the terminal
            logger.removeHandler(other)
        logger.addHandler(handler)
        logger.propagate = False
    for name in ("spotlight_core", "tasks", "flows"):
        logging.getLogger(name).setLevel(logging.INFO)
    return handler


def stop_logging(handler: logging.Handler) -> None:
    for name in _LOGGERS:
        logging.getLogger(name).removeHandler(handler)
        logging.getLogger(name).propagate = True
    handler.close()


def hush_console() -> None:
    """Keep Prefect from the terminal: an error is told once, by us, and an interrupt is no crash.

    Its pages have its log lines all the same.
    """
    from prefect.logging.handlers import PrefectConsoleHandler  # not before its settings are made

    for name in (None, "prefect", "prefect.flow_runs", "prefect.task_runs"):  # None: its own is the root's
        for handler in logging.getLogger(name).handlers:
            if isinstance(handler, PrefectConsoleHandler):
                handler.setLevel(logging.CRITICAL + 1)
