"""Draw what `castwise run` prints for a script that trains in bf16 and whose loss turns NaN.

python docs/pictures/terminal.py
python docs/pictures/terminal.py --record    # run the script again, and write what it prints
"""

from __future__ import annotations

import os
import pty
import re
import subprocess
import sys
import tempfile
from pathlib import Path

from rich.console import Console
from rich.terminal_theme import MONOKAI
from rich.text import Text

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
SCRIPT = ROOT / "examples" / "nan_in_bf16.py"
RECORDED = ROOT / "benchmarks" / "results" / "terminal.txt"
COLUMNS = 96
# rich's own format loads its font from the network.
FORMAT = """\
<svg class="rich-terminal" viewBox="0 0 {width} {height}" xmlns="http://www.w3.org/2000/svg" role="img" \
aria-label="What castwise run prints for a script whose loss turns NaN">
<style>
.{unique_id}-matrix {{ font: {char_height}px/{line_height}px ui-monospace, Menlo, Consolas, monospace; }}
{styles}
</style>
<defs>
<clipPath id="{unique_id}-clip-terminal"><rect width="{terminal_width}" height="{terminal_height}"/></clipPath>
{lines}
</defs>
{chrome}
<g transform="translate({terminal_x}, {terminal_y})" clip-path="url(#{unique_id}-clip-terminal)">
{backgrounds}
<g class="{unique_id}-matrix">
{matrix}
</g>
</g>
</svg>
"""


def record() -> str:
    """Run the script in a terminal, and return what it prints, with colors."""
    with tempfile.TemporaryDirectory() as folder:
        script = Path(folder) / "train.py"
        script.write_text(SCRIPT.read_text())
        ours, theirs = pty.openpty()
        # Without the warning of CPUs that have no units for bf16.
        environment = {**os.environ, "COLUMNS": str(COLUMNS), "TERM": "xterm-256color", "PYTHONWARNINGS": "ignore"}
        command = [sys.executable, "-m", "castwise", "run", "train.py"]
        with subprocess.Popen(command, cwd=folder, stdout=theirs, stderr=theirs, env=environment):
            os.close(theirs)
            printed = b"".join(iter(lambda: _read(ours), b""))
        os.close(ours)
        text = printed.decode().replace("\r\n", "\n").replace(f"{Path(folder).resolve()}{os.sep}", "")
    return f"$ castwise run train.py\n{text}"


def _read(terminal: int) -> bytes:
    try:
        return os.read(terminal, 1 << 16)
    except OSError:  # the other end is closed
        return b""


def pictures() -> dict[str, str]:
    """Return the picture by its name."""
    text = Text.from_ansi(RECORDED.read_text())
    with open(os.devnull, "w") as nowhere:
        console = Console(record=True, width=COLUMNS, file=nowhere, legacy_windows=False)
        console.print(text)
        svg = console.export_svg(title="", theme=MONOKAI, code_format=FORMAT, unique_id="terminal")
    return {"terminal": re.sub(r"[ \t]+$", "", svg, flags=re.MULTILINE)}


def main() -> None:
    """Draw the picture, after recording it anew if asked to."""
    if "--record" in sys.argv[1:]:
        RECORDED.write_text(record())
    for name, svg in pictures().items():
        (HERE / f"{name}.svg").write_text(svg)


if __name__ == "__main__":
    main()
