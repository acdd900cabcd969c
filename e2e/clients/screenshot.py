"""`python -m e2e.clients.screenshot [PATH]`: a picture of the demo's page under its built-in load."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Final

from e2e.clients.browser import browser
from e2e.ports import free_ports
from plait.backends.profiles import load_profile
from plait.lab.simulation.endless_load import DEFAULT_CALLS_PER_S, running_load
from plait.lab.simulation.processes import FleetPlan, running_fleet

PICTURE: Final = Path(__file__).parents[2] / "docs" / "images" / "demo.png"
MOST_BYTES: Final = 200_000
WARM_UP_S: Final = 30.0
KEY: Final = "a-key-for-the-picture"


def main() -> None:
    """Take the picture."""
    path = Path(sys.argv[1]) if sys.argv[1:] else PICTURE
    port = free_ports(5)[0]
    kv_tokens = load_profile(FleetPlan(kv_tokens=1).profile).kv.tokens
    plan = FleetPlan(port=port, engine_port=port + 1, kv_tokens=kv_tokens, admin_key=KEY)
    with running_fleet(plan), running_load(plan.url, plan.model, DEFAULT_CALLS_PER_S), browser() as page:
        page.colours("light" if "--light" in sys.argv else "dark")
        page.open(f"{plan.url}/#key={KEY}")
        page.look(WARM_UP_S)
        page.screenshot(path)
    size = path.stat().st_size
    sys.stderr.write(f"{path}: {size:,} bytes\n")
    if size > MOST_BYTES:
        sys.exit(f"more than {MOST_BYTES:,}")


if __name__ == "__main__":
    main()
