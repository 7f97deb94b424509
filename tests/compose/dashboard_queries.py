"""Every query of Grafana dashboards as a rule file on stdout, for promtool to check."""

import json
import re
import sys
from pathlib import Path


def queries(file: Path) -> list[str]:
    """Raises ValueError for a dashboard without an address, or a panel without a query."""
    dashboard = json.loads(file.read_text())
    found: list[str] = []
    for panel in dashboard["panels"]:
        asked = [target["expr"] for target in panel["targets"]]
        if not asked or panel["datasource"]["uid"] != "fedpress":
            raise ValueError(f"{file}: panel {panel['title']!r} asks nothing of Prometheus")
        found += asked
    if dashboard["uid"] != "fedpress":
        raise ValueError(f"{file}: the compose file's address of the dashboard is fedpress")
    return [re.sub(r"\$__rate_interval", "5m", each).replace("$task", ".*") for each in found]


if __name__ == "__main__":
    asked = [each for name in sys.argv[1:] for each in queries(Path(name))]
    rules = [
        {"record": f"dashboard:query:{place}", "expr": expr} for place, expr in enumerate(asked)
    ]
    print(json.dumps({"groups": [{"name": "dashboards", "rules": rules}]}))
