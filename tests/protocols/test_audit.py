"""The chain of an audit log: whatever is changed in it, the first link that breaks is told."""

import hashlib
import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fedpress_protocols.audit import (
    BEFORE_THE_FIRST,
    NOTHING,
    AuditEntry,
    Head,
    checked,
    digest_of,
    end_of,
)
from fedpress_protocols.errors import BrokenChain, ConfigurationError

VECTOR = Path(__file__).parents[2] / "protocols" / "vectors" / "audit.json"

texts = st.text(st.characters(exclude_categories=["Cs"]), max_size=8)
values = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**53) + 1, 2**53 - 1) | texts,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(texts, inner, max_size=3),
    max_leaves=5,
)
said = st.tuples(texts, texts, texts, st.dictionaries(texts, values, max_size=3))


def chain(things: list[Any], start: int = 1, previous: str = BEFORE_THE_FIRST) -> list[AuditEntry]:
    found = []
    for seq, (actor, action, subject, details) in enumerate(things, start=start):
        fields = {
            "seq": seq,
            "at": 1_800_000_000_000 + seq,
            "actor": actor,
            "action": action,
            "subject": subject,
            "details": details,
            "previous": previous,
        }
        previous = digest_of(fields)
        found.append(AuditEntry(**fields, hash=previous))
    return found


def small(number: int) -> list[AuditEntry]:
    return chain([("server", "server.started", f"s{index}", {}) for index in range(number)])


def test_the_vector_is_read_by_its_description_alone() -> None:
    """By docs/audit.md, with nothing of this package."""
    previous = "0" * 64
    told = json.loads(VECTOR.read_text())["entries"]
    for entry in told:
        assert entry["previous"] == previous
        rest = {name: value for name, value in entry.items() if name != "hash"}
        plain = json.dumps(rest, sort_keys=True, separators=(",", ":"), ensure_ascii=False)
        previous = hashlib.sha256(b"fedpress audit v1\x00" + plain.encode()).hexdigest()
        assert entry["hash"] == previous
    entries = [AuditEntry.model_validate(each) for each in told]
    assert end_of(checked(entries)) == Head(seq=3, hash=previous)


@given(st.lists(said, max_size=6))
def test_a_whole_chain_is_whole_and_survives_its_lines(things: list[Any]) -> None:
    entries = chain(things)
    lines = [entry.to_line() for entry in entries]
    assert [AuditEntry.from_line(line) for line in lines] == entries
    heads = [Head(seq=each.seq, hash=each.hash) for each in entries]
    assert end_of(checked(entries, heads=heads)) == (heads[-1] if heads else NOTHING)
    for head in heads:
        assert Head.parsed(str(head)) == head


@given(st.lists(said, min_size=1, max_size=6), st.data())
def test_any_one_change_is_found_where_it_is(things: list[Any], data: st.DataObject) -> None:
    entries = chain(things)
    head = Head(seq=len(entries), hash=entries[-1].hash)
    at = data.draw(st.integers(0, len(entries) - 1))
    kind = data.draw(st.sampled_from(["alter", "rehash", "remove", "swap", "insert", "double"]))
    victim = entries[at]
    changed = list(entries)
    match kind:
        case "alter" | "rehash":
            name = data.draw(
                st.sampled_from(["seq", "at", "actor", "action", "subject", "details", "previous"])
            )
            other: dict[str, Any] = {
                "seq": victim.seq + 1,
                "at": victim.at + 1,
                "actor": victim.actor + "x",
                "action": victim.action[1:] + "y",
                "subject": victim.subject + "z",
                "details": {**victim.details, "more": True},
                "previous": victim.hash,
            }
            changed[at] = victim.model_copy(update={name: other[name]})
            if kind == "rehash":
                changed[at] = changed[at].model_copy(update={"hash": changed[at].digest})
        case "remove":
            del changed[at]
        case "swap":
            if len(entries) == 1:
                return
            with_ = (at + 1) % len(entries)
            changed[at], changed[with_] = changed[with_], changed[at]
        case "insert":
            forged = chain([("server", "x", "", {})], victim.seq, victim.previous)
            changed.insert(at, forged[0])
        case "double":
            changed.insert(at, victim)
    with pytest.raises(BrokenChain) as found:
        end_of(checked(changed, heads=[head]))
    assert 1 <= found.value.members["seq"] <= len(entries) + 1


def test_an_entry_that_says_something_else_has_another_hash() -> None:
    entries = small(5)
    entries[2] = entries[2].model_copy(update={"actor": "nobody"})
    with pytest.raises(BrokenChain, match=r"entry 3 has hash .*, and what it says has") as found:
        end_of(checked(entries))
    assert found.value.members["seq"] == 3


def test_an_entry_that_follows_another_is_found() -> None:
    entries = small(5)
    entries[2] = entries[2].model_copy(update={"previous": entries[0].hash})
    with pytest.raises(BrokenChain, match="entry 3 follows"):
        end_of(checked(entries))


def test_what_was_cut_off_at_the_end_is_found_by_a_head_alone() -> None:
    entries = small(5)
    head = Head(seq=5, hash=entries[4].hash)
    assert end_of(checked(entries[:3])).seq == 3
    with pytest.raises(BrokenChain, match=r"entry 5 is missing: the log ends at 3, and had 5:"):
        end_of(checked(entries[:3], heads=[head]))
    with pytest.raises(BrokenChain, match="entry 5 is missing: the log is empty"):
        end_of(checked([], heads=[head]))
    with pytest.raises(BrokenChain, match="entry 5 is missing: the log is empty"):
        end_of(checked([], heads=[head], after=None))


def test_a_log_that_was_written_anew_is_found_by_a_head() -> None:
    whole, forged = small(3), chain([("nobody", "x", "", {})] * 3)
    head = Head(seq=2, hash=whole[1].hash)
    assert end_of(checked(forged)).seq == 3
    with pytest.raises(BrokenChain, match=r"entry 2 has hash .* and had .* once"):
        end_of(checked(forged, heads=[head]))


def test_a_part_of_a_log_is_checked_from_where_it_begins() -> None:
    entries = small(6)
    before = Head(seq=2, hash=entries[1].hash)
    assert end_of(checked(entries[2:], after=before, heads=[before])).seq == 6
    assert end_of(checked(entries[2:], after=None)).seq == 6
    with pytest.raises(BrokenChain, match="entry 3 is missing: entry 4 comes after 2"):
        end_of(checked(entries[3:], after=before))
    with pytest.raises(BrokenChain, match="and had"):
        end_of(checked([], after=before, heads=[Head(seq=2, hash="f" * 64)]))


def test_details_that_no_log_has_break_the_chain() -> None:
    entry = small(1)[0].model_copy(update={"details": {"rate": 0.5}})
    with pytest.raises(BrokenChain, match="entry 1: a fraction"):
        end_of(checked([entry]))


@pytest.mark.parametrize(
    "line",
    [
        "",
        "[]",
        "{}",
        "no JSON",
        small(1)[0].to_line().replace(":", ": ", 1),
        small(1)[0].to_line().replace('"seq":1', '"seq":"1"'),
        small(1)[0].to_line().replace('"seq":1', '"seq":1,"more":1'),
        small(1)[0].to_line().replace('"details":{}', '"details":{"a":0.5}'),
        small(1)[0].to_line().replace('"details":{}', '"details":' + '{"a":' * 40 + "1" + "}" * 40),
    ],
)
def test_a_line_that_is_no_entry_is_refused(line: str) -> None:
    with pytest.raises(ConfigurationError):
        AuditEntry.from_line(line)


@pytest.mark.parametrize(
    "text", ["", "5", ":", "x:" + "0" * 64, "-1:" + "0" * 64, "1:ab", "1" * 20]
)
def test_a_head_is_a_number_and_a_hash(text: str) -> None:
    with pytest.raises(ConfigurationError, match="is not a head"):
        Head.parsed(text)
