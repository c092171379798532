"""`castwise` and `python -m castwise`: the command line, an extra that the library itself never needs."""

from __future__ import annotations

import sys


def main() -> None:
    """Run the command line; without its extra, say how to get it (exit code 2)."""
    try:
        from castwise.cli import app, run
    except ModuleNotFoundError as error:
        if error.name not in {"typer", "rich", "click"}:
            raise
        sys.exit(_missing(error.name))
    try:
        app(prog_name="castwise")
    except SystemExit:
        if not run.chosen:
            raise
    run.chosen[0]()


def _missing(name: str | None) -> int:
    sys.stderr.write(f"castwise: the command line needs {name}: pip install 'castwise[cli]'\n")
    return 2


if __name__ == "__main__":
    main()
