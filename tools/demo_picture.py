"""Makes docs/img/demo.svg from a real run of the demo: its last picture of the live view, and what it says at the end.

stty cols 120 rows 24; script -qec ".venv/bin/pgcdc playground --seconds 30" demo.raw
.venv/bin/python tools/demo_picture.py demo.raw
"""

from __future__ import annotations

import io
import re
import sys
from pathlib import Path

from rich.console import Console
from rich.text import Text

PICTURE = Path(__file__).parents[1] / "docs" / "img" / "demo.svg"
COLUMNS, ROWS = 120, 22
_HOME, _END_OF_VIEW = "\x1b[H", "\x1b[?1049l"
_FONT = re.compile(r"@font-face \{.*?\}\s*", re.DOTALL)


def make_picture(raw: str) -> str:
    """The SVG. It has no fonts of other hosts: a terminal's own are near enough."""
    view, _, rest = raw.replace("\r", "").rpartition(_END_OF_VIEW)
    frames = [frame for frame in view.split(_HOME) if "commit to file" in frame]
    frame = re.sub(r"\x1b\[\?\d+[hl]", "", frames[-1]).rstrip().splitlines()
    last = [line for line in rest.splitlines() if "Script done" not in line and line.strip()]
    shown = [*frame[: ROWS - 1], frame[-1], "", *last]
    console = Console(record=True, width=COLUMNS, file=io.StringIO(), force_terminal=True, color_system="truecolor")
    for line in shown:
        console.print(Text.from_ansi(line), overflow="crop", no_wrap=True, soft_wrap=False)
    picture = console.export_svg(title="make demo", unique_id="demo")
    return _FONT.sub("", picture).replace("Fira Code", "ui-monospace, SFMono-Regular, Menlo, Consolas")


if __name__ == "__main__":
    PICTURE.write_text(make_picture(Path(sys.argv[1]).read_text(errors="replace")))
