"""`{commands}`: the command-line reference, generated from typer."""

from __future__ import annotations

import re
from typing import Any

import typer
from generated import directive
from sphinx.application import Sphinx

from castwise._cli import app as command_line


def pages() -> str:
    """Return a section for each command: usage, description, arguments and options."""
    group: Any = typer.main.get_command(command_line)
    context = group.make_context("castwise", [], resilient_parsing=True)
    sections = [_section(group, context, "castwise")]
    for name in group.list_commands(context):
        command = group.get_command(context, name)
        within = command.make_context(name, [], parent=context, resilient_parsing=True)
        sections.append(_section(command, within, f"castwise {name}"))
    return "\n".join(sections)


def _section(command: Any, context: Any, title: str) -> str:
    usage = " ".join([title, *command.collect_usage_pieces(context)])
    rows = [row for param in command.get_params(context) if (row := param.get_help_record(context))]
    lines = [f"## `{title}`", "", "```text", usage, "```", "", _prose((command.help or "").strip()), ""]
    lines += [command.epilog, ""] if command.epilog else []
    lines += ["| | |", "|---|---|", *(f"| `{_cell(what)}` | {_prose(_cell(text))} |" for what, text in rows), ""]
    return "\n".join(lines)


def _cell(text: str) -> str:
    return " ".join(text.split()).replace("|", "\\|")


def _prose(text: str) -> str:
    """Escape text so that `runs/<time>` is not parsed as a tag and the dashes of options are not joined."""
    return re.sub(r"(?<![\w`-])(--[a-z][\w-]*)", r"`\1`", text.replace("<", "\\<"))


def setup(app: Sphinx) -> dict[str, bool]:
    """Register the directive."""
    app.add_directive("commands", directive(pages))
    return {"parallel_read_safe": True}
