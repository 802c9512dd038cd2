"""Run the page docs/real-model.md, and write what its commands print, their times and their memory.

    python -m tests.real.page [FOLDER]      FOLDER, made anew: where the commands run; default: .real/page

Only what stands between the fences of a console block, and the line below it, is replaced.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import time
from pathlib import Path

from tests.real.make_model import MODEL

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "real-model.md"
BLOCK = re.compile(
    r'```(console|python title="(?P<file>[\w.]+)")\n(?P<content>.*?)```\n(?:\n\*[\d,]+ s[^\n]*\*\n)?', re.DOTALL
)


def run_command(line: str, folder: Path) -> tuple[str, float, float]:
    """Run a line in the folder: what it printed, its seconds, and its peak memory in GB."""
    environment = os.environ | {"COLUMNS": "80", "HF_HUB_OFFLINE": "1", "NO_COLOR": "1"}
    environment["HF_DATASETS_CACHE"] = str(folder / "cache")  # so that samples of an earlier run are not taken
    started = time.monotonic()
    process = subprocess.Popen(
        line.replace("scale-surgery", f"{sys.executable} -m scale_surgery"),
        cwd=folder,
        env=environment,
        shell=True,
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
    )
    assert process.stdout is not None
    printed = process.stdout.read()
    _, status, usage = os.wait4(process.pid, 0)
    if status:
        raise SystemExit(f"{line}: exit code {os.waitstatus_to_exitcode(status)}\n{printed}")
    return printed, time.monotonic() - started, usage.ru_maxrss * 1024 / 1e9


def run_block(match: re.Match[str], folder: Path) -> str:
    """Run the lines of a block, and write it anew."""
    if file := match["file"]:
        (folder / file).write_text(match["content"], encoding="utf-8")
        subprocess.run([sys.executable, file], cwd=folder, check=True)
        return match[0]
    shown, seconds, memory = list[str](), 0.0, 0.0
    for line in match["content"].splitlines():
        if line.startswith("$ "):
            print(line, flush=True)
            printed, taken, peak = run_command(line[2:], folder)
            shown += [line, *(kept.rstrip() for kept in printed.splitlines())]
            seconds, memory = seconds + taken, max(memory, peak)
    block = "\n".join(shown).rstrip()
    return f"```console\n{block}\n```\n\n*{seconds:,.0f} s, {memory:.1f} GB*\n"


def main() -> None:
    """Run the page in a new folder beside the model."""
    model = ROOT / ".real" / MODEL
    if not model.is_dir():
        raise SystemExit(f"{model} is not there. Make it: make real-model")
    folder = Path(sys.argv[1]) if len(sys.argv) > 1 else model.parent / "page"
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    (folder / MODEL).symlink_to(model)
    os.environ["PYTHONPATH"] = str(ROOT)
    page = PAGE.read_text(encoding="utf-8")
    for match in BLOCK.finditer(page):
        page = page.replace(match[0], run_block(match, folder))
        PAGE.write_text(page, encoding="utf-8")  # what ran is kept if a later block fails


if __name__ == "__main__":
    main()
