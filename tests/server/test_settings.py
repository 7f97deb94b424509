"""Where settings come from, and which go before which."""

import re
from pathlib import Path
from typing import Any

import click
import pytest

from fedpress.cli import app
from fedpress_protocols.errors import ConfigurationError
from fedpress_server import Settings
from fedpress_server.command import SECTIONS, main
from fedpress_server.settings import OTHER_VARIABLES, secret_settings, unknown_variables


@pytest.fixture
def toml(tmp_path: Path) -> Path:
    file = tmp_path / "fedpress.toml"
    file.write_text('port = 1\nhost = "::1"\npoll_seconds = 2.5\n')
    return file


def test_flags_go_before_variables_and_these_before_the_file(
    toml: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FEDPRESS_PORT", "2")
    monkeypatch.setenv("FEDPRESS_POLL_SECONDS", "3")
    settings = Settings.load(toml, poll_seconds="4", data_dir=None)
    assert (settings.host, settings.port, settings.poll_seconds) == ("::1", 2, 4.0)
    assert settings.data_dir == Path("fedpress-data")


def test_the_admin_token_may_lie_in_a_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "token"
    file.write_text("0123456789abcdef\n")
    monkeypatch.setenv("FEDPRESS_ADMIN_TOKEN_FILE", str(file))
    settings = Settings.load()
    assert settings.admin_token is not None
    assert settings.admin_token.get_secret_value() == "0123456789abcdef"
    assert "0123456789" not in repr(settings)
    monkeypatch.setenv("FEDPRESS_ADMIN_TOKEN", "fedcba9876543210")
    with pytest.raises(ConfigurationError, match="not both"):
        Settings.load()


def test_an_empty_variable_is_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As `-e FEDPRESS_ADMIN_TOKEN_FILE=` takes a file's name out of a container's settings."""
    monkeypatch.setenv("FEDPRESS_ADMIN_TOKEN_FILE", "")
    monkeypatch.setenv("FEDPRESS_ADMIN_TOKEN", "0123456789abcdef")
    loaded = Settings.load()
    assert loaded.admin_token_file is None
    assert loaded.admin_token is not None


def test_secrets_of_database_and_store_may_lie_in_files(tmp_path: Path) -> None:
    url, key = tmp_path / "url", tmp_path / "key"
    url.write_text("postgresql://ada:9f86d081884c@host/name\n")
    key.write_text("secret key\n")
    settings = Settings.load(
        database_url_file=url, store_access_key_id="ada", store_secret_access_key_file=key
    )
    assert settings.resolved_database_url == "postgresql://ada:9f86d081884c@host/name"
    assert settings.store_secret_access_key is not None
    assert settings.store_secret_access_key.get_secret_value() == "secret key"
    assert "9f86d081884c" not in repr(settings)
    assert "secret key" not in repr(settings)


def test_every_secret_has_a_file_and_none_is_printed(tmp_path: Path) -> None:
    secret = "9f86d081884c7d659a2feaa0c55ad015"
    named = secret_settings()
    looks_secret = [
        name
        for name in Settings.model_fields
        if any(word in name for word in ("token", "secret", "password", "database_url"))
    ]
    assert {name.removesuffix("_file") for name in looks_secret} == set(named)
    file = tmp_path / "secret"
    file.write_text(secret)
    for name in named:
        besides: dict[str, Any] = (
            {"store_access_key_id": "ada"} if name == "store_secret_access_key" else {}
        )
        settings = Settings.load(**{f"{name}_file": file}, **besides)
        found = getattr(settings, name)
        assert (found if isinstance(found, str) else found.get_secret_value()) == secret
        assert secret not in repr(settings)
        with pytest.raises(ConfigurationError, match="not both"):
            Settings.load(**{f"{name}_file": file, **besides, name: secret})


def test_a_secret_that_everybody_can_read_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("fedpress_protocols.local_files.is_exposed", lambda file: True)
    file = tmp_path / "secret"
    file.write_text("9f86d081884c7d659a2feaa0c55ad015")
    for name in ("admin_token_file", "database_url_file"):
        with pytest.raises(ConfigurationError, match=rf"{name}: every user.*chmod 0600"):
            Settings.load(**{name: file})
    toml = tmp_path / "fedpress.toml"
    toml.write_text("port = 1\n")
    assert Settings.load(toml).port == 1
    toml.write_text('admin_token = "9f86d081884c7d659a2feaa0c55ad015"\n')
    with pytest.raises(ConfigurationError, match="a secret among the settings"):
        Settings.load(toml)


@pytest.mark.parametrize(
    ("flags", "says"),
    [
        ({"port": "x"}, "port"),
        ({"colour": "blue"}, "colour"),
        ({"admin_token": "short"}, "16 characters"),
        ({"admin_token_file": "/nowhere"}, "admin_token_file"),
        ({"tls_key": "key.pem"}, "together"),
        ({"clock_skew": "301"}, "clock_skew"),
        ({"database_url": "sqlite:////a.db", "database_url_file": "/nowhere"}, "not both"),
        ({"store_access_key_id": "key"}, "together"),
        ({"store_endpoint": "http://foo"}, "store_endpoint needs store_url"),
        ({"store_region": "eu"}, "store_region needs store_url"),
        ({"store_endpoint": "ftp://foo", "store_url": "s3://b"}, "'ftp://foo' is not an address"),
        ({"allowed_hosts": "a.example, http://127.0.0.1"}, "'http://127.0.0.1' is not a host name"),
        ({"allowed_hosts": "a.example:8443"}, "without scheme and port"),
        ({"allowed_hosts": "*"}, "not a host name"),
        ({"tick_seconds": "inf"}, "tick_seconds: must be a finite number"),
    ],
)
def test_what_cannot_be_set_says_why(flags: dict[str, Any], says: str) -> None:
    with pytest.raises(ConfigurationError, match=says):
        Settings.load(**flags)


def test_a_file_with_an_unknown_setting_is_refused(toml: Path) -> None:
    toml.write_text("prot = 8080\n")
    with pytest.raises(ConfigurationError, match="prot"):
        Settings.load(toml)
    with pytest.raises(ConfigurationError, match="no configuration file"):
        Settings.load(toml.parent / "other.toml")


def test_help_lists_every_setting(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        main(["--help"])
    assert caught.value.code == 0
    told = capsys.readouterr().out
    for name, field in Settings.model_fields.items():
        assert field.description
        assert f"FEDPRESS_{name.upper()}" in told.replace("\n", " ")


def test_every_setting_has_one_section_of_help() -> None:
    listed = [name for names in SECTIONS.values() for name in names]
    without_option = {"admin_token", "metrics_token", "store_secret_access_key"}
    named = set(Settings.model_fields) - without_option
    assert sorted(listed) == sorted(named), (
        f"list {sorted(named ^ set(listed))} once in SECTIONS in server/fedpress_server/command.py"
    )


def test_help_shows_type_bounds_and_default(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["--help"])
    shown = " ".join(capsys.readouterr().out.split())
    for text in (
        "--port INTEGER",
        "[env var: FEDPRESS_PORT; default: 8080; 0<=x<=65535]",
        "--log-format [text|json]",
        "--open-metrics true|false",
        "--check-ins-per-second FLOAT",
    ):
        assert text in shown


def test_a_wrong_flag_ends_with_a_sentence(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        main(["--port", "many"])
    assert caught.value.code == 2
    assert "port: must be a whole number, not 'many'" in capsys.readouterr().err


@pytest.mark.parametrize(
    "secret",
    [
        "changeme",
        "please-change-me-now",
        "<a long random string>",
        "x" * 32,
        "your_secret_token_here",
    ],
)
def test_a_secret_that_is_a_placeholder_is_refused(secret: str, tmp_path: Path) -> None:
    file = tmp_path / "secret"
    file.write_text(secret + "\n")
    for setting in ("admin_token", "store_secret_access_key"):
        keys: dict[str, Any] = {"store_access_key_id": "ada"} if setting.startswith("store") else {}
        with pytest.raises(ConfigurationError, match=f"{setting} is a placeholder"):
            Settings.load(**{f"{setting}_file": file}, **keys)
    with pytest.raises(ConfigurationError, match="password is a placeholder"):
        Settings.load(database_url="postgresql://ada:changeme@host/name")


def test_a_file_of_a_secret_that_is_empty_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "secret"
    file.write_text("\n")
    for setting in ("admin_token_file", "database_url_file"):
        with pytest.raises(ConfigurationError, match="is empty"):
            Settings.load(**{setting: file})


def test_every_number_is_finite() -> None:
    numbers: dict[str, Any] = {
        name: "nan" for name, field in Settings.model_fields.items() if field.annotation is float
    }
    assert "check_ins_per_second" in numbers
    with pytest.raises(ConfigurationError) as refused:
        Settings.load(**numbers)
    assert refused.value.detail.count("must be a finite number") == len(numbers)


def test_hosts_are_names_and_bracketed_addresses() -> None:
    settings = Settings.load(allowed_hosts="FL.example.org, *.example.net, 10.0.0.1, [::1]")
    assert settings.hosts == ("fl.example.org", "*.example.net", "10.0.0.1", "[::1]")


def test_a_variable_that_nothing_reads_is_told_of() -> None:
    known = {f"FEDPRESS_{name.upper()}": "1" for name in Settings.model_fields}
    known |= dict.fromkeys(OTHER_VARIABLES, "1") | {"HOME": "/root", "fedpress_port": "1"}
    assert unknown_variables(known) == []
    assert unknown_variables(
        {"FEDPRESS_COLOUR_OF_MY_CAR": "red", "FEDPRESS_STOER_URL": "s3://"}
    ) == [
        "nothing reads the variable FEDPRESS_COLOUR_OF_MY_CAR",
        "nothing reads the variable FEDPRESS_STOER_URL: did you mean FEDPRESS_STORE_URL?",
    ]


def test_every_variable_in_use_is_known_and_every_known_one_in_use() -> None:
    """A new one belongs into OTHER_VARIABLES, or into `examples` if it is none."""
    root = Path(__file__).parents[2]
    folders = ("benchmarks", "client_sdk", "compression", "fedpress", "integrations", "protocols")
    files = [
        file for name in (*folders, "server", "strategies") for file in root.glob(f"{name}/**/*.py")
    ]
    files += [*root.glob("*.yml"), root / "Makefile", root / "tests" / "lengths.py"]
    text = "\n".join(file.read_text("utf-8") for file in files)
    named = set(re.findall(r"(?<!\w)FEDPRESS_[A-Z0-9_]*[A-Z0-9]\b", text)) | options_variables()
    examples = {"FEDPRESS_NAME", "FEDPRESS_NAME_FILE", "FEDPRESS_BENCHMARK_NAMESPACE"}
    settings = {f"FEDPRESS_{name.upper()}" for name in Settings.model_fields}
    assert named - settings - examples == OTHER_VARIABLES


def options_variables() -> set[str]:
    """The variables of all commands' options."""
    found, commands = set[str](), list[click.Command]([app])
    while commands:
        command = commands.pop()
        found |= {str(each.envvar) for each in command.params if each.envvar}
        commands += command.commands.values() if isinstance(command, click.Group) else ()
    return found
