"""`castwise` and `python -m castwise`: the command line, which needs the `cli` extra. The library does not."""

from __future__ import annotations

import os
import sys

HELP = """\
Usage: castwise [--version] [--help] COMMAND

  A drop-in replacement for torch.amp that finds the cause of NaNs and skipped steps.

  The commands check, compare, demo, diagnose, doctor, fix, report, run, trace, tune and watch need the `cli` extra.
  Once it is installed, `castwise --help` describes them:

      pip install 'castwise[cli]'
"""


def main() -> None:
    """Run the command line; without the `cli` extra, print how to install it and exit with 2 (`check`: 125).

    `--help` and `--version` work without the extra and exit with 0.
    """
    if sys.argv[1:2] == ["check"]:
        _fix_string_hashes()
    try:
        from castwise._cli import app
        from castwise._cli import run_command as run
    except ModuleNotFoundError as error:
        if error.name not in {"typer", "rich", "click"}:
            raise
        sys.exit(_without_extra(sys.argv[1:], error.name))
    try:
        app(prog_name="castwise")
    except SystemExit:
        if not run.chosen:
            raise
    run.chosen[0]()


def _fix_string_hashes() -> None:
    """Start this command again with PYTHONHASHSEED=0 unless it is set: an order of a set would differ in each command.

    Windows cannot replace a process; a check says there that the hashes differ.
    """
    if "PYTHONHASHSEED" not in os.environ and sys.executable and os.name == "posix":
        os.execve(sys.executable, [sys.executable, *sys.orig_argv[1:]], os.environ | {"PYTHONHASHSEED": "0"})


def _without_extra(arguments: list[str], missing: str) -> int:
    if arguments == ["--version"]:
        import castwise

        print(f"castwise {castwise.__version__}")
        return 0
    if arguments == ["--help"]:
        print(HELP, end="")
        return 0
    sys.stderr.write(f"castwise: the command line needs {missing}: pip install 'castwise[cli]'\n")
    return 125 if arguments[:1] == ["check"] else 2  # git bisect run reads 2 as a verdict


if __name__ == "__main__":
    main()
