"""The command `fedpress completion`."""

from __future__ import annotations

import click
from click.shell_completion import BashComplete, FishComplete, ShellComplete, ZshComplete

from fedpress.command_line import Command, argument

_SHELLS: dict[str, type[ShellComplete]] = {
    "bash": BashComplete,
    "zsh": ZshComplete,
    "fish": FishComplete,
}


_ONCE = """\b
bash:  echo 'eval "$(fedpress completion bash)"' >> ~/.bashrc
zsh:   echo 'eval "$(fedpress completion zsh)"' >> ~/.zshrc
fish:  fedpress completion fish > ~/.config/fish/completions/fedpress.fish
"""


@click.command("completion", cls=Command, epilog=_ONCE)
@argument("shell", type=click.Choice(list(_SHELLS)), help="The shell.")
@click.pass_context
def completion(context: click.Context, shell: str) -> None:
    """Print the completion script of bash, zsh or fish."""
    made = _SHELLS[shell]
    root = context.find_root()
    click.echo(made(root.command, {}, "fedpress", "_FEDPRESS_COMPLETE").source())
