"""Rate limits: a token bucket for each address, in bounded memory."""

from __future__ import annotations

import ipaddress

from starlette.requests import Request

_MOST_KEYS = 4096


class Budgets:
    """Token buckets by key: `burst` at once, then `per_second`.

    A key that is idle long enough has its full budget again and is forgotten. Beyond 4,096 keys the
    one that has spent least is evicted first, so a flood of new keys does not evict limited ones.
    Not thread-safe.
    """

    def __init__(self, *, burst: float, per_second: float) -> None:
        self._burst = burst
        self._per_second = per_second
        self._spent: dict[str, tuple[float, float]] = {}
        """By key: the amount spent, and when."""

    def wait(self, key: str, now: float, cost: float = 1.0) -> float:
        """Seconds until `cost` can be spent; 0 if it can be now."""
        return max(0.0, (self._left_over(key, now) + cost - self._burst) / self._per_second)

    def spend(self, key: str, now: float, cost: float = 1.0) -> None:
        """Spend `cost`, or the rest of the budget."""
        spent = self._left_over(key, now)
        if key not in self._spent and len(self._spent) >= _MOST_KEYS:
            self._forget(now)
        self._spent[key] = min(self._burst, spent + cost), now

    def give_back(self, key: str, cost: float = 1.0) -> None:
        """Refund `cost`."""
        if key in self._spent:
            spent, at = self._spent[key]
            self._spent[key] = max(0.0, spent - cost), at

    def _left_over(self, key: str, now: float) -> float:
        """The part of the key's spending that has not been refilled."""
        spent, at = self._spent.get(key, (0.0, now))
        return max(0.0, spent - max(0.0, now - at) * self._per_second)

    def _forget(self, now: float) -> None:
        spent = {key: self._left_over(key, now) for key in self._spent}
        least = sorted(spent, key=spent.__getitem__)[: _MOST_KEYS // 4]
        idle = {key for key in spent if not spent[key]} | set(least)
        self._spent = {key: bucket for key, bucket in self._spent.items() if key not in idle}


def address_of(request: Request) -> str:
    """The bucket key of a request: the peer's address, for IPv6 its /64 network. Behind a proxy all
    requests have the proxy's."""
    return budget_of(request.client.host if request.client else "")


def budget_of(host: str) -> str:
    """The bucket key of an address: itself, for IPv6 its /64 network; other text unchanged."""
    try:
        address = ipaddress.ip_address(host)
    except ValueError:
        return host[:64]
    if address.version == 4:
        return str(address)
    return str(ipaddress.ip_network((address, 64), strict=False))
