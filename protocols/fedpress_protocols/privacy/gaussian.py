"""Gaussian noise rounded to integers, exact to 2**-256, from a key stream.

A value is k with the probability that a normal variable of the deviation lies in
[k - 1/2, k + 1/2). Added to an integer it is the rounding of that integer plus a normal variable:
whatever a Gaussian mechanism guarantees holds to the letter, since rounding comes after it, and no
floating-point number is ever released.

    uniform bits → normal quantile in float64 → nearest integer, or the exact tail where it is close

The quantile (Wichura 1988, algorithm AS 241) decides wherever its error cannot change the integer;
near a boundary the tail is computed to 90 digits and compared with 256 uniform bits. So values do
not depend on a machine's mathematical library.
"""

from __future__ import annotations

import math
from decimal import Context, Decimal, localcontext
from functools import cache

import numpy as np
import numpy.typing as npt

from fedpress_protocols.errors import ConfigurationError
from fedpress_protocols.masking.keystream import MATERIAL_BYTES, add_keystream

Ints = npt.NDArray[np.int64]
Floats = npt.NDArray[np.float64]

SECRET_BYTES = MATERIAL_BYTES
MIN_DEVIATION, MAX_DEVIATION = 1.0, 2.0**36
"""In integer steps. Beyond, too many values would lie too close to a boundary."""
REACH = 19
"""No value is further from zero than this many deviations and a half: the bits end at 18.6."""

_BITS = 256
_SHIFT = _BITS - 64
_RARE = 2**20
"""Magnitudes whose leading bits, of 2**63, are below this are decided by all of their bits."""
_ERROR = 4e-15
"""Relative error of the quantile: some twenty times that of its algorithm and its logarithm."""
_DIGITS = Context(prec=90)
_CHUNK = 2**15

_CENTRE = (
    (2.5090809287301226727e3, 3.3430575583588128105e4, 6.7265770927008700853e4,
     4.5921953931549871457e4, 1.3731693765509461125e4, 1.9715909503065514427e3,
     1.3314166789178437745e2, 3.3871328727963666080e0),
    (5.2264952788528545610e3, 2.8729085735721942674e4, 3.9307895800092710610e4,
     2.1213794301586595867e4, 5.3941960214247511077e3, 6.8718700749205790830e2,
     4.2313330701600911252e1, 1.0),
)  # fmt: skip
_MIDDLE = (
    (7.74545014278341407640e-4, 2.27238449892691845833e-2, 2.41780725177450611770e-1,
     1.27045825245236838258e0, 3.64784832476320460504e0, 5.76949722146069140550e0,
     4.63033784615654529590e0, 1.42343711074968357734e0),
    (1.05075007164441684324e-9, 5.47593808499534494600e-4, 1.51986665636164571966e-2,
     1.48103976427480074590e-1, 6.89767334985100004550e-1, 1.67638483018380384940e0,
     2.05319162663775882187e0, 1.0),
)  # fmt: skip
_TAIL = (
    (2.01033439929228813265e-7, 2.71155556874348757815e-5, 1.24266094738807843860e-3,
     2.65321895265761230930e-2, 2.96560571828504891230e-1, 1.78482653991729133580e0,
     5.46378491116411436990e0, 6.65790464350110377720e0),
    (2.04426310338993978564e-15, 1.42151175831644588870e-7, 1.84631831751005468180e-5,
     7.86869131145613259100e-4, 1.48753612908506148525e-2, 1.36929880922735805310e-1,
     5.99832206555887937690e-1, 1.0),
)  # fmt: skip


def check_deviation(deviation: float) -> None:
    """Raise ConfigurationError for a deviation outside [MIN_DEVIATION, MAX_DEVIATION]."""
    if not MIN_DEVIATION <= deviation <= MAX_DEVIATION:
        raise ConfigurationError(
            f"Gaussian noise of deviation {deviation:g} steps, expected {MIN_DEVIATION:g} to "
            f"{MAX_DEVIATION:g}",
            hint="choose a clip and a noise_multiplier nearer to 1",
        )


def sample(size: int, deviation: float, secret: bytes) -> Ints:
    """`size` values of the `deviation`, in steps, each at most REACH deviations from zero.

    The same `secret` gives the same values. It is SECRET_BYTES known to nobody else, and used for
    one vector. Raises ConfigurationError for a deviation out of range.
    """
    check_deviation(deviation)
    values = np.empty(size, np.int64)
    words = np.zeros(min(size, _CHUNK), np.uint64)
    for start in range(0, size, _CHUNK):
        uniform = words[: min(_CHUNK, size - start)]
        uniform[:] = 0
        add_keystream(uniform, secret, "chacha20", offset=start)
        leading = uniform >> np.uint64(1)
        distance = -deviation * _quantile((leading.astype(np.float64) + 0.5) * 2.0**-64)
        magnitude = np.floor(distance + 0.5)
        edge = np.abs(distance - np.floor(distance) - 0.5)
        quantile = distance / deviation
        with np.errstate(over="ignore"):
            width = 2.0**-63 * math.sqrt(2 * math.pi) * np.exp(quantile * quantile / 2)
        error = deviation * (_ERROR * (1 + quantile) + width)
        for index in np.flatnonzero((edge <= error) | (leading < _RARE)).tolist():
            more = np.zeros(_SHIFT // 64, np.uint64)
            add_keystream(more, secret, "chacha20", offset=size + more.size * (start + index))
            exact = int(leading[index])
            for word in more.tolist():
                exact = exact << 64 | word
            magnitude[index] = _magnitude(exact, deviation)
        signs = (uniform & np.uint64(1)).astype(np.int64) * 2 - 1
        values[start : start + uniform.size] = signs * magnitude.astype(np.int64)
    return values


def _magnitude(exact: int, deviation: float) -> int:
    """The k >= 0 with tail((k + 1/2) / deviation) <= `exact` / 2**256 < tail of k - 1/2."""
    distance = -deviation * float(_quantile(np.array([max(exact, 1) * 2.0**-_BITS]))[0])
    below = math.floor(distance)  # the boundary nearest to the distance is below + 1/2
    with localcontext(_DIGITS):
        tail = _upper_tail((Decimal(below) + Decimal("0.5")) / Decimal(deviation))
        return below + (Decimal(exact) / Decimal(2**_BITS) < tail)


def _quantile(tail: Floats) -> Floats:
    """The normal quantile of `tail`, each in (0, 1/2]; relative error about 1e-16."""
    central = tail - 0.5
    near = -central <= 0.425
    result = np.empty_like(tail)
    square = 0.180625 - central[near] ** 2
    result[near] = central[near] * _ratio(square, *_CENTRE)
    root = np.sqrt(-np.log(tail[~near]))
    result[~near] = -np.where(root <= 5, _ratio(root - 1.6, *_MIDDLE), _ratio(root - 5, *_TAIL))
    return result


def _ratio(x: Floats, above: tuple[float, ...], below: tuple[float, ...]) -> Floats:
    ratio: Floats = np.polyval(above, x) / np.polyval(below, x)
    return ratio


def _upper_tail(z: Decimal) -> Decimal:
    """1 - Phi(z) for 0 <= z <= 20, to 2**-256: 1/2 less phi(z) times the sum over n of
    z**(2n + 1) / (2n + 1)!!, whose terms are positive."""
    term = total = z
    odd = 1
    while term > total * Decimal("1e-90"):
        odd += 2
        term = term * z * z / odd
        total += term
    return Decimal("0.5") - total * (-z * z / 2).exp() / _root_of_two_pi()


@cache
def _root_of_two_pi() -> Decimal:
    """By Machin's formula for pi."""

    def arctan_of_inverse(n: int) -> Decimal:
        power = total = Decimal(1) / n
        k = 1
        while abs(power) > Decimal("1e-95"):
            power = -power / (n * n)
            k += 2
            total += power / k
        return total

    with localcontext(Context(prec=100)):
        pi = 4 * (4 * arctan_of_inverse(5) - arctan_of_inverse(239))
        return (2 * pi).sqrt()
