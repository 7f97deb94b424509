"""A server's key names the next, and a device follows."""

import importlib.util
import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from fedpress_protocols.errors import FedpressError, InvalidSignature
from fedpress_protocols.key_rollover import (
    MAX_KEY_ROLLOVERS,
    KeyRollover,
    ServerKeys,
    SignedKeyRollover,
    follow_rollovers,
    sign_key_rollover,
    verify_key_rollover,
)
from fedpress_protocols.signatures import DeviceKey, canonical_json, key_id_of

PROTOCOLS = Path(__file__).parents[2] / "protocols"
GOLDEN: dict[str, Any] = json.loads((PROTOCOLS / "vectors/server-keys.json").read_text())
KEYS = tuple(DeviceKey.from_bytes(bytes([index]) * 32) for index in range(6))
CHAIN = tuple(
    sign_key_rollover(key, KEYS[index + 1].public, index) for index, key in enumerate(KEYS[:-1])
)


def made() -> str:
    path = PROTOCOLS / "vectors/make_server_key_vectors.py"
    spec = importlib.util.spec_from_file_location("make_server_key_vectors", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return str(module.text())


def test_the_golden_chains_are_made_again_to_the_byte() -> None:
    assert made() == (PROTOCOLS / "vectors/server-keys.json").read_text()


@pytest.mark.parametrize("vector", GOLDEN["chains"], ids=lambda vector: vector["name"])
def test_a_golden_chain_leads_where_it_should(vector: dict[str, Any]) -> None:
    told = ServerKeys.model_validate(
        {"server_key": CHAIN[0].succession.key, "successions": vector["successions"]}
    ).successions
    pinned = bytes.fromhex(vector["pinned"])
    if vector["error"] is not None:
        with pytest.raises(FedpressError) as caught:
            follow_rollovers(pinned, vector["key_id"], told)
        assert caught.value.slug == vector["error"]
        return
    passed = follow_rollovers(pinned, vector["key_id"], told)
    assert [key.hex() for key in passed] == vector["passed"]


def test_the_example_of_the_specification_is_the_first_golden_statement() -> None:
    first = GOLDEN["chains"][0]["successions"][0]
    whole = {**first["succession"], "key_id": first["key_id"], "signature": first["signature"]}
    text = (PROTOCOLS / "SPEC-signatures.md").read_text()
    assert canonical_json(whole).decode() in text


@given(st.permutations(CHAIN), st.integers(0, 4), st.integers(1, 5))
def test_a_chain_leads_on_from_any_of_its_keys_and_never_back(
    said: list[SignedKeyRollover], pinned: int, ahead: int
) -> None:
    wanted = min(pinned + ahead, 5)
    keys = [key.public for key in KEYS]
    assert follow_rollovers(keys[pinned], key_id_of(keys[wanted]), said) == tuple(
        keys[pinned + 1 : wanted + 1]
    )
    with pytest.raises(InvalidSignature, match="no chain"):
        follow_rollovers(keys[wanted], key_id_of(keys[pinned]), said)


@given(st.integers(0, 4), st.sampled_from(["key", "successor", "made_at"]), st.integers(0, 5))
def test_a_statement_that_was_changed_anywhere_is_nobodys(
    index: int, field: str, other: int
) -> None:
    signed = CHAIN[index]
    value = 99 if field == "made_at" else CHAIN[(other + 1) % 5].succession.key
    changed = signed.succession.model_copy(update={field: value})
    if changed == signed.succession:
        return
    forged = signed.model_copy(update={"succession": changed})
    with pytest.raises(InvalidSignature):
        verify_key_rollover(forged)


def test_a_list_that_is_too_long_or_a_key_in_two_spellings_is_refused() -> None:
    with pytest.raises(ValidationError):
        ServerKeys(
            server_key=CHAIN[0].succession.key, successions=CHAIN[:1] * (MAX_KEY_ROLLOVERS + 1)
        )
    loose = CHAIN[0].succession.key[:-1] + "B"
    with pytest.raises(ValidationError):
        KeyRollover(key=loose, successor=CHAIN[0].succession.successor, made_at=0)
