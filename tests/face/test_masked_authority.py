"""An enrolment authority from the command line, and what it certifies."""

from __future__ import annotations

import json
import stat
import time
from pathlib import Path

import pytest
from click.testing import CliRunner

from fedpress.authority import EnrolmentAuthority, Request, make_authority
from fedpress.cli import app
from fedpress_protocols.errors import ConfigurationError, InvalidSignature, NotFound
from fedpress_protocols.masking.certificates import Certificate
from fedpress_protocols.signatures import DeviceKey, from_base64url, key_id_of, to_base64url


def run(*arguments: object) -> str:
    result = CliRunner().invoke(app, [str(each) for each in arguments])
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    assert result.exit_code == 0, result.output
    return result.output.strip()


def test_a_certificate_goes_from_the_authority_to_a_device(tmp_path: Path) -> None:
    key, out = tmp_path / "authority.pem", tmp_path / "certificate"
    public = run("authority", "init", key)
    assert stat.S_IMODE(key.stat().st_mode) == 0o600
    device = run("authority", "request", tmp_path / "device")
    assert device == run("authority", "request", tmp_path / "device")
    run(
        "authority",
        "issue",
        key,
        device,
        "--out",
        out,
        "--name",
        "camera",
        "--population",
        "kitchen",
    )
    made = Certificate.from_bytes(out.read_bytes())
    assert (made.client_id, made.identity) == ("camera", from_base64url(device, 32))
    made.check(from_base64url(public, 32), population="kitchen", now=time.time())


def test_what_cannot_be_certified_is_refused(tmp_path: Path) -> None:
    key = tmp_path / "authority.pem"
    public = run("authority", "init", key)
    before = key.read_bytes()
    with pytest.raises(ConfigurationError, match="never overwritten"):
        run("authority", "init", key)
    assert key.read_bytes() == before
    out = tmp_path / "certificate"
    with pytest.raises(ConfigurationError, match="cannot be read"):
        run("authority", "issue", tmp_path / "nowhere", public, "--out", out)
    with pytest.raises(ConfigurationError, match="base64url"):
        run("authority", "issue", key, "short", "--out", out)
    with pytest.raises(ConfigurationError, match="64 are allowed"):
        run("authority", "issue", key, public, "--out", out, "--name", "x" * 65)
    assert not out.exists()


def test_a_key_that_begins_with_a_dash_is_a_key(tmp_path: Path) -> None:
    key, out = tmp_path / "authority.pem", tmp_path / "certificate"
    run("authority", "init", key)
    dashed = next(each for each in iter(lambda: keys(1)[0], "") if each.startswith("-"))
    run("authority", "issue", key, dashed, "--out", out, "--name", "oven")
    assert json.loads(run("authority", "inspect", out, "--json"))["key"] == dashed
    assert CliRunner().invoke(app, ["authority", "issue", str(key), "-o"]).exit_code == 2


def run_with(text: str, *arguments: object) -> str:
    result = CliRunner().invoke(app, [str(each) for each in arguments], input=text)
    assert result.exception is None, result.output
    return result.stdout.strip()


def keys(number: int) -> list[str]:
    return [to_base64url(DeviceKey.generate().public) for _ in range(number)]


def listed(key: Path) -> dict[str, str]:
    """By the name: what a certificate's state is."""
    found = json.loads(run("authority", "list", key, "--json"))
    return {each["name"]: each["state"] for each in found}


def test_many_are_certified_from_a_file_and_none_if_one_line_is_wrong(tmp_path: Path) -> None:
    key, requests, out = tmp_path / "key.pem", tmp_path / "requests", tmp_path / "out"
    public = run("authority", "init", key)
    assert run("authority", "public", key) == public
    one, two = keys(2)
    requests.write_text(f"# the kitchen\n{one} oven\n\n{two} ../hood # odd\n")
    run("authority", "issue", key, "--requests", requests, "--out", out)
    names = sorted(each.name for each in out.iterdir())
    assert names == sorted([f"{key_id_of(from_base64url(two, 32))}.cert", "oven.cert"])
    shown = json.loads(
        run("authority", "inspect", out / "oven.cert", "--authority", public, "--json")
    )
    assert (shown["key"], shown["name"]) == (one, "oven")
    assert listed(key) == {"oven": "good", "../hood": "good"}
    for text, says in (
        (f"{one}\n", "line 1"),
        (f"{one} a\n{one} b\n", "line 2.*twice"),
        (f"{keys(1)[0]} a\nshort b\n", "base64url"),
    ):
        requests.write_text(text)
        with pytest.raises(ConfigurationError, match=says):
            run("authority", "issue", key, "--requests", requests, "--out", out)
    assert len(listed(key)) == 2
    with pytest.raises(InvalidSignature):
        run("authority", "inspect", out / "oven.cert", "--authority", keys(1)[0])


def test_a_key_with_a_passphrase_signs_only_with_it(tmp_path: Path) -> None:
    key, out, file = tmp_path / "key.pem", tmp_path / "cert", tmp_path / "passphrase"
    public = run_with("correct horse\ncorrect horse\n", "ca", "init", key, "--encrypt")
    public = public.splitlines()[-1]
    assert b"ENCRYPTED" in key.read_bytes()
    device = keys(1)[0]
    run_with("correct horse\n", "ca", "issue", key, device, "--out", out, "--name", "one")
    made = Certificate.from_bytes(out.read_bytes())
    made.check(from_base64url(public, 32), population="fedpress", now=time.time())
    file.write_text("battery staple\n")
    with pytest.raises(ConfigurationError, match="passphrase is wrong"):
        run("authority", "issue", key, device, "--out", out, "--ca-passphrase-file", file)
    assert listed(key) == {"one": "good"}


def test_a_device_that_changed_its_key_gets_another_certificate_when_it_is_said(
    tmp_path: Path,
) -> None:
    key, out = tmp_path / "key.pem", tmp_path / "cert"
    run("authority", "init", key)
    old, new = keys(2)
    run("authority", "issue", key, old, "--out", out, "--name", "one")
    before = out.read_bytes()
    with pytest.raises(ConfigurationError, match="--new-key"):
        run("authority", "issue", key, new, "--out", out, "--name", "one")
    assert out.read_bytes() == before
    run("authority", "issue", key, new, "--out", out, "--name", "one", "--new-key")
    assert listed(key) == {"one": "good"}
    every = json.loads(run("authority", "list", key, "--all", "--json"))
    assert [each["state"] for each in every] == ["superseded", "good"]
    assert Certificate.from_bytes(out.read_bytes()).identity == from_base64url(new, 32)


def test_what_is_revoked_is_never_issued_or_renewed_again(tmp_path: Path) -> None:
    key, out = tmp_path / "key.pem", tmp_path / "out"
    run("authority", "init", key)
    stays, goes, later = keys(3)
    for device, name, days in ((stays, "stays", 5), (goes, "goes", 5), (later, "later", 90)):
        run(
            "authority",
            "issue",
            key,
            device,
            "--out",
            tmp_path / name,
            "--name",
            name,
            "--days",
            days,
        )
    said = run("authority", "revoke", key, "goes")
    assert "fedpress devices revoke" in said
    assert listed(key) == {"stays": "good", "goes": "revoked", "later": "good"}
    with pytest.raises(ConfigurationError, match="were revoked"):
        run("authority", "issue", key, goes, "--out", tmp_path / "goes")
    with pytest.raises(NotFound):
        run("authority", "revoke", key, "nobody")
    assert run("authority", "renew", key, "--out", out, "--within", 30) == f"{out}: 1 certificates"
    renewed = Certificate.from_bytes((out / "stays.cert").read_bytes())
    assert renewed.expires > time.time() + 300 * 86400
    assert run("authority", "renew", key, "--out", out, "--within", 30) == f"{out}: 0 certificates"


def test_what_expired_is_renewed_and_a_register_that_is_damaged_is_told(tmp_path: Path) -> None:
    now = 1_790_000_000.0
    file = tmp_path / "key.pem"
    make_authority(file)
    held = EnrolmentAuthority(file, lambda: "", lambda: now)
    (device,) = keys(1)
    held.issue([Request(device, "one")], population="kitchen", days=1)
    now += 2 * 86400
    assert [each.state for each in held.entries()] == ["expired"]
    (made,) = held.renew(within_days=0, days=1)
    assert (made.client_id, made.population) == ("one", "kitchen")
    assert [each.state for each in held.entries()] == ["superseded", "good"]
    register = tmp_path / "key.pem.issued"
    assert stat.S_IMODE(register.stat().st_mode) == 0o600
    register.write_bytes(register.read_bytes()[:-9])
    with pytest.raises(ConfigurationError, match=r"key.pem.issued, line 2"):
        held.entries()
