"""The page about the command line has every command and option that typer has."""

from __future__ import annotations

from typing import Any

import commands
import typer

from castwise._cli import app


def test_every_command_and_option_is_there() -> None:
    page = commands.pages()
    group: Any = typer.main.get_command(app)
    names = list(group.commands)
    assert {"compare", "demo", "doctor", "report", "run", "trace", "tune"} <= set(names)
    for name, command in group.commands.items():
        _, _, section = page.partition(f"## `castwise {name}`\n")
        section = section.partition("\n## ")[0]
        for param in command.params:
            if param.param_type_name == "option":
                assert all(option in section for option in param.opts), (name, param.name)
        assert command.help.split()[0] in section


def test_what_markdown_would_swallow_is_kept() -> None:
    assert commands._prose("in runs/<time>, see --out or `--all`") == "in runs/\\<time>, see `--out` or `--all`"
