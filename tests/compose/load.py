"""Load for docker-compose.yml: devices that train, devices that wait, until SIGTERM; then whether
anything went wrong. SIGUSR1 has it print what was answered so far.

    python -m tests.compose.load DEVICES_URL OPERATORS_URL ADMIN_TOKEN_FILE

Exit code 1 if a request got 5xx other than 503 with Retry-After, or an upload was lost or counted
twice.
"""

import signal
import sys
import threading
from pathlib import Path

import httpx

from tests.devices import Operator
from tests.system.one_hot_fleet import Fleet
from tests.system.waiting_fleet import Answers, full_task, waiting


def main(devices_url: str, operators_url: str, token: Path) -> int:
    is_over, answers = threading.Event(), Answers()
    signal.signal(signal.SIGTERM, lambda *_: is_over.set())
    signal.signal(signal.SIGUSR1, lambda *_: print("so far:", answers, flush=True))
    limits = httpx.Limits(max_connections=None)
    with (
        httpx.Client(
            base_url=devices_url, timeout=60, limits=limits, event_hooks=answers.hooks
        ) as devices,
        httpx.Client(base_url=operators_url, timeout=60, event_hooks=answers.hooks) as operators,
    ):
        operator = Operator(operators, token.read_text().strip())
        fleet = Fleet([devices], 5000, operator)
        full_task(operator, devices)
        with waiting(40, operator, [devices], answers, wait=20.0), fleet.taking_part():
            fleet.wait_for_rounds(1)
            print("under load", flush=True)
            is_over.wait()
        uploads = fleet.check()
        rounds = sum(each.state == "committed" for each in fleet.history())
    print(answers)
    print(f"{rounds} rounds, {uploads} uploads, 0 lost, 0 doubled")
    for what, number in answers.failures.most_common():
        print(f"FAILED {number} x {what}")
    return 1 if answers.failures else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1], sys.argv[2], Path(sys.argv[3])))
