"""A command as somebody types it."""

from __future__ import annotations

from click.testing import CliRunner, Result

from scale_surgery.cli.program import main


def run(*words: object, code: int = 0, input: str | None = None) -> Result:
    """Run `scale-surgery` with these words in a terminal of 80 columns; its exit code has to be this one."""
    result = CliRunner(env={"COLUMNS": "80", "TERM": "dumb", "NO_COLOR": "1"}).invoke(
        main, list(map(str, words)), input=input
    )
    assert result.exit_code == code, result.output
    return result
