"""`python -m services.controller`"""

import asyncio
import sys

from services.controller.service import run
from services.controller.settings import ControllerSettings
from shared.failpoints import in_role
from shared.rpc.lifetime import tie_to_parent
from shared.rpc.server import EXIT_SETTINGS
from shared.rpc.settings import SettingsError
from shared.telemetry import logs


def main() -> int:
    """Reads settings and serves."""
    try:
        settings = ControllerSettings.load()
    except SettingsError as error:
        print(f"sextet controller: {error}", file=sys.stderr)
        return EXIT_SETTINGS
    in_role(settings.role)
    logs.configure(settings.role, settings.replica, settings.log_level)
    tie_to_parent()
    return asyncio.run(run(settings))


if __name__ == "__main__":
    sys.exit(main())
