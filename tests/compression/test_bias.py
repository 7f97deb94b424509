"""Energy that a compressor without error feedback never sends."""

from __future__ import annotations

import numpy as np
import pytest

from fedpress_compression.bias import is_noisy_alone, never_sent, typical_update
from fedpress_compression.compressors.bernoulli import Bernoulli
from fedpress_compression.compressors.coded import Coded
from fedpress_compression.compressors.count_sketch import CountSketch
from fedpress_compression.compressors.dgc import Dgc
from fedpress_compression.compressors.error_feedback import ErrorFeedback
from fedpress_compression.compressors.none import Uncompressed
from fedpress_compression.compressors.randomk import RandomK
from fedpress_compression.compressors.topk import TopK


@pytest.mark.parametrize("made", [Uncompressed(), Bernoulli(), Dgc(TopK(0.001))])
def test_what_is_unbiased_or_kept_is_sent_in_time(made: object) -> None:
    assert never_sent(made) == 0.0  # type: ignore[arg-type]


@pytest.mark.parametrize("fraction", [0.01, 0.1])
def test_top_k_never_sends_what_is_not_among_its_largest(fraction: float) -> None:
    squares = np.sort(np.square(typical_update(1), dtype=np.float64))[::-1]
    rest = squares[int(np.ceil(fraction * squares.size)) :].sum() / squares.sum()
    made = TopK(fraction)
    assert rest <= never_sent(made) < rest + 0.1  # what its few bits round off is never sent either


def test_random_k_without_a_gain_sends_its_fraction_of_every_coordinate() -> None:
    assert never_sent(RandomK(0.01)) == pytest.approx(0.99**2, abs=0.02)


@pytest.mark.parametrize(
    ("made", "is_noisy"),
    [
        (CountSketch(recover="mean"), True),
        (Coded(RandomK(0.01, unbiased=True)), True),
        (TopK(0.001), False),
        (Coded(TopK(0.001)), False),
        (ErrorFeedback(TopK(0.001)), False),
        (Dgc(TopK(0.001)), False),
    ],
)
def test_an_upload_that_is_noise_alone_is_told_from_one_that_loses_too_much(
    made: object, is_noisy: bool
) -> None:
    assert is_noisy_alone(made) is is_noisy  # type: ignore[arg-type]
