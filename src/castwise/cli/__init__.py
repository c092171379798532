"""The command line: a file for each command, which declares it and imports what it runs when it runs.

Help and completion must not wait for torch, so no file that declares a command imports it, or a module that does, at
its top. `import castwise` never comes here, so typer and rich are imported freely. typer's own tracebacks stay off: a
user's mistake is one line and exit code 2 (`castwise._user_error`), and anything else deserves Python's full traceback.
"""

from __future__ import annotations

import io
import sys
from typing import Annotated

import typer

import castwise
from castwise.cli.bench import bench as bench_command
from castwise.cli.comparing import compare as compare_command
from castwise.cli.comparing import tune as tune_command
from castwise.cli.demo import demo as demo_command
from castwise.cli.doctor import doctor as doctor_command
from castwise.cli.report import report as report_command
from castwise.cli.run import run as run_command
from castwise.cli.tracing import trace as trace_command

app = typer.Typer(pretty_exceptions_enable=False, rich_markup_mode="markdown", no_args_is_help=True)
app.command(epilog="Example: `castwise bench --only step_cost --device cpu`")(bench_command)
app.command(epilog="Example: `castwise compare --model models/gpt.py:task --policy bf16 --policy mine.toml`")(
    compare_command
)
app.command(epilog="Example: `castwise demo --steps 50 --data notes.txt`")(demo_command)
app.command(epilog="Example: `castwise doctor --json > machine.json`")(doctor_command)
app.command(epilog="Example: `castwise report runs/baseline runs/fp16 -o both.html`")(report_command)
app.command(
    # What `run` does not know is refused by `run` itself, which can say where it belongs.
    context_settings={"allow_interspersed_args": False, "ignore_unknown_options": True},
    epilog="Example: `castwise run --policy fp16_stable train.py --lr 3e-4`",
)(run_command)
app.command(epilog="Example: `castwise trace --model models/gpt.py:make --input 8x128:int64`")(trace_command)
app.command(epilog="Example: `castwise tune --model models/gpt.py:task --tolerance 0.001 -o policy.toml`")(tune_command)


def _print_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"castwise {castwise.__version__}")
        raise typer.Exit()


@app.callback()
def main(
    context: typer.Context,
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None:
    """Mixed-precision training for PyTorch that says what happened to the numbers."""
    if context.invoked_subcommand == "run":  # the streams are the script's
        return
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):  # not every path or name can be written in every encoding
            stream.reconfigure(errors="backslashreplace")
