"""`fedpress compressors`, as somebody who has to choose a method meets it."""

from __future__ import annotations

import json

import pytest
from click.testing import CliRunner

from fedpress.cli import app
from fedpress.compressor_option import compressor_from_option
from fedpress.compressor_table import bits_per_value, by_default, described, table
from fedpress_compression.compressor import compressors, from_config
from fedpress_compression.compressors.count_sketch import CountSketch
from fedpress_compression.compressors.eden import Eden
from fedpress_compression.compressors.error_feedback import ErrorFeedback
from fedpress_compression.compressors.per_tensor import PerTensor
from fedpress_compression.compressors.shared_support import SharedSupport
from fedpress_protocols.errors import ConfigurationError


def test_the_table_has_a_line_for_every_method() -> None:
    shown = CliRunner().invoke(app, ["compressors"])
    assert shown.exit_code == 0
    heading, *lines = shown.stdout.splitlines()
    assert [line.split()[0] for line in lines] == list(compressors())
    assert shown.stdout.rstrip() == table().rstrip()
    column = heading.index("linear")
    claims = {line.split()[0]: line[column:].split()[0] for line in lines}
    assert (claims["shared_support"], claims["topk"]) == ("yes", "-")
    costs = {line.split()[0]: float(line.split()[1]) for line in lines}
    assert costs["none"] == 32
    assert costs["stc"] < 0.1


@pytest.mark.parametrize("name", compressors())
def test_a_method_is_shown_with_an_example_that_works(name: str) -> None:
    shown = CliRunner().invoke(app, ["compressors", "show", name])
    assert shown.exit_code == 0
    assert shown.stdout.startswith(f"{name}: ")
    example = from_config(json.loads(shown.stdout.rstrip().splitlines()[-1]))
    assert example == by_default(name)
    assert f"{bits_per_value(example):.3f}" in shown.stdout


def test_an_unknown_method_is_named_with_those_there_are() -> None:
    with pytest.raises(ConfigurationError, match="no compressor has the id 'gzip'; known are "):
        described("gzip")


def test_an_unbiased_method_typed_bare_goes_without_feedback() -> None:
    """Its error may exceed the update, and a residual of such errors grows without end."""
    assert compressor_from_option("eden") == PerTensor(Eden())
    mmse = ErrorFeedback(PerTensor(Eden(scale="mmse")))
    assert compressor_from_option("eden:scale=mmse") == mmse


@pytest.mark.parametrize("name", ["delta", "ef21", "terngrad", "terngrad:clip_deviations=2.5"])
def test_what_does_not_suit_feedback_goes_without_it(name: str) -> None:
    assert isinstance(compressor_from_option(name), PerTensor)


def test_a_sketch_under_masks_goes_without_feedback() -> None:
    assert compressor_from_option("count_sketch", masked=True) == CountSketch()
    shared = compressor_from_option("shared_support", masked=True)
    assert shared == ErrorFeedback(SharedSupport())


def test_feedback_that_diverges_cannot_be_typed() -> None:
    with pytest.raises(ConfigurationError, match="use qsgd without error_feedback"):
        compressor_from_option('{"id": "error_feedback", "inner": {"id": "qsgd"}}')
