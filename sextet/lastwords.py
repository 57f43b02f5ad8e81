"""Why a service ended, from the end of its log."""

import json
from pathlib import Path

LINES, CHARACTERS = 3, 600


def last_words(log: Path) -> str:
    """The last lines of a log that say something: a service's own message, else events and errors."""
    if not log.exists():
        return "it has no log"
    lines = [line.strip() for line in log.read_text(errors="replace").splitlines()[-60:] if line.strip()]
    own = [line for line in lines if line.startswith(("sextet ", "sextet:"))]
    told = own[-1:] or [text for line in lines if (text := _text(line))][-LINES:]
    return " | ".join(told)[-CHARACTERS:] or "its log is empty"


def _text(line: str) -> str:
    if not line.startswith("{"):
        return line
    try:
        entry = json.loads(line)
    except ValueError:
        return line
    # The controller logs a run's events as such; what happened is their message.
    event = entry.get("message") if entry.get("event") == "event" else entry.get("event")
    error = entry.get("error") or (entry.get("exception") or "").strip().rpartition("\n")[2]
    return ": ".join(str(part) for part in (event, error) if part)
