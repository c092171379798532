"""The command line, with one file per command.

Help and completion must not wait for torch, so command files import torch, directly or indirectly, only when the
command runs. `import castwise` does not import this package, so typer and rich may be imported at the top. typer's
tracebacks are off: a user's mistake prints one line and exits with code 2 (`castwise._user_error`), an error in the
user's model shows a traceback without castwise's frames above it, and any other error shows Python's full traceback.
"""

from __future__ import annotations

import io
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Annotated, Any

import typer
from typer.core import TyperCommand, TyperGroup

import castwise
from castwise._cli.check_command import CANNOT_RUN, check
from castwise._cli.compare_tune_commands import compare, tune
from castwise._cli.demo_command import demo
from castwise._cli.diagnose_command import diagnose
from castwise._cli.doctor_command import doctor
from castwise._cli.fix_command import fix
from castwise._cli.report_command import report
from castwise._cli.run_command import run
from castwise._cli.trace_command import trace
from castwise._cli.watch_command import watch

_USAGE_ERROR: Any = typer.BadParameter.__base__  # from click, or from the copy of click in newer versions of typer


@contextmanager
def _usage_errors_in_one_line(context: Any = None) -> Iterator[None]:
    try:
        yield
    except _USAGE_ERROR as error:
        called = ["castwise"] if context is None else ["castwise", context.invoked_subcommand]
        command = " ".join(called) if error.ctx is None else error.ctx.command_path  # the parser has no context
        message = " ".join(error.format_message().split()).rstrip(".")
        is_check = command == "castwise check"  # whose exit code `git bisect run` reads
        may_be_the_scripts = is_check and message.startswith("No such option")
        hint = "; the script's own options follow `--`" if may_be_the_scripts else ""
        typer.echo(f"{command}: {message[:1].lower()}{message[1:]} (see `{command} --help`{hint})", err=True)
        raise typer.Exit(CANNOT_RUN if is_check else error.exit_code) from None


# typer would also force colours into a pipe if GITHUB_ACTIONS is set.
if os.environ.get("GITHUB_ACTIONS") and not (os.environ.get("FORCE_COLOR") or os.environ.get("PY_COLORS")):
    from typer import rich_utils  # slow to import; typer does so only to print help

    rich_utils.FORCE_TERMINAL = None


def _without_values(params: list[Any]) -> list[Any]:
    """Return parameters whose flags have no value in the help, where new versions of typer show `<bool>`."""
    for param in params:
        if getattr(param, "is_flag", False):
            param.metavar = ""
    return params


class _Command(TyperCommand):
    def get_params(self, ctx: Any) -> list[Any]:
        return _without_values(super().get_params(ctx))


class _Commands(TyperGroup):
    """The group of commands; reports usage errors in one line, like other user errors."""

    def get_params(self, ctx: Any) -> list[Any]:
        return _without_values(super().get_params(ctx))

    def make_context(self, *args: Any, **options: Any) -> Any:
        with _usage_errors_in_one_line():
            return super().make_context(*args, **options)

    def invoke(self, ctx: Any) -> Any:
        with _usage_errors_in_one_line(ctx):
            return super().invoke(ctx)


_EXIT_CODES = """\
Exit codes (`castwise run` exits with the script's code, or with 1 if `--fail-on` matches):

* 0: success
* 1: negative result (weights differ, no policy found, not the same computation, findings left to be corrected by hand),
  or error in the model
* 2: invalid command line or input; the message says what to do
* 125: `castwise check` has no verdict, also because of an invalid command line
* 130: Ctrl-C
"""

_RUN_EPILOG = """\
Example: `castwise run --policy fp16_stable train.py --lr 3e-4`

What it prints of a loss that turned NaN (shortened):

```text
castwise: critical: Training is lost from step 87 on: ...
          Step 87: In the forward, aten.div gives nan, at train.py:22.
              x = x / x.norm(dim=-1, keepdim=True)
          Sample 5 of the batch, dataset[1574].
          Check for divisors that are 0, and add an epsilon.
          Tried on the batch of step 87: finite without sample 5.
castwise: castwise fix prints 1 edit of the script for this (untried):
              + x = x / x.norm(dim=-1, keepdim=True).clamp_min(1e-12)
castwise: report: castwise-run/20261126-013750-3357/report.html
```
"""

app = typer.Typer(
    cls=_Commands,
    pretty_exceptions_enable=False,
    rich_markup_mode="markdown",
    context_settings={"help_option_names": ["--help", "-h"]},
    epilog=_EXIT_CODES,
)
app.command(cls=_Command, epilog="Example: `castwise check train.py --against golden.cwcheck`")(check)
app.command(
    cls=_Command, epilog="Example: `castwise compare --model models/gpt.py:task --policy bf16 --policy mine.toml`"
)(compare)
app.command(cls=_Command, epilog="Example: `castwise demo --steps 50 --data notes.txt`")(demo)
app.command(cls=_Command, epilog="Example: `castwise diagnose capsule-7.safetensors --model models/gpt.py:make`")(
    diagnose
)
app.command(cls=_Command, epilog="Example: `castwise doctor --json > machine.json`")(doctor)
app.command(cls=_Command, epilog="Example: `castwise fix --apply`")(fix)
app.command(cls=_Command, epilog="Example: `castwise report runs/baseline runs/fp16 -o both.html`")(report)
app.command(
    cls=_Command,
    # `run` itself rejects unknown options, so that its message can say where they belong.
    context_settings={"allow_interspersed_args": False, "ignore_unknown_options": True},
    epilog=_RUN_EPILOG,
)(run)
app.command(cls=_Command, epilog="Example: `castwise trace --model models/gpt.py:make --input 8x128:int64`")(trace)
app.command(
    cls=_Command, epilog="Example: `castwise tune --model models/gpt.py:task --tolerance 0.001 -o policy.toml`"
)(tune)
app.command(cls=_Command, epilog="Example: `castwise watch castwise-run`")(watch)


def _print_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"castwise {castwise.__version__}")
        raise typer.Exit()


@app.callback(invoke_without_command=True)
def main(
    context: typer.Context,
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None:
    """A drop-in replacement for torch.amp that finds the cause of NaNs and skipped steps."""
    if context.invoked_subcommand is None:
        typer.echo(context.get_help())
        raise typer.Exit()
    if context.invoked_subcommand == "run":  # the streams are the script's
        return
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):  # some paths and names cannot be encoded
            stream.reconfigure(errors="backslashreplace")
