"""JSON logs on stderr, one line an event, with run, step and operation of whatever work is being done."""

import logging
import sys

import structlog

LEVELS = ("debug", "info", "warning", "error")


def configure(role: str, replica: str, level: str = "info") -> None:
    """Sets up structlog and the standard library's logging alike; call once, at start."""
    shared = [
        structlog.contextvars.merge_contextvars,
        structlog.stdlib.add_log_level,
        structlog.processors.TimeStamper(fmt="iso", utc=True),
        structlog.stdlib.ExtraAdder(),
        _constant(role=role, replica=replica),
        structlog.processors.format_exc_info,
    ]
    structlog.configure(
        processors=[*shared, structlog.stdlib.ProcessorFormatter.wrap_for_formatter],
        logger_factory=structlog.stdlib.LoggerFactory(),
        wrapper_class=structlog.stdlib.BoundLogger,
        cache_logger_on_first_use=False,
    )
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(
        structlog.stdlib.ProcessorFormatter(
            foreign_pre_chain=shared,
            processors=[
                structlog.stdlib.ProcessorFormatter.remove_processors_meta,
                structlog.processors.JSONRenderer(),
            ],
        )
    )
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(level.upper())
    # These say at "info" what our own events say better.
    for noisy in ("asyncio", "grpc", "httpx", "httpcore", "redis", "urllib3", "filelock"):
        logging.getLogger(noisy).setLevel(logging.WARNING)


def _constant(**fields: str) -> structlog.typing.Processor:
    def add(_logger: object, _method: str, event: structlog.typing.EventDict) -> structlog.typing.EventDict:
        return {**fields, **event}

    return add
