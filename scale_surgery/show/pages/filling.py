"""HTML pages from templates: values are escaped, and an unfilled gap is an error.

Control characters and marks of direction in it are shown by signs, also in the data of a page's script.
"""

from __future__ import annotations

from pathlib import Path

from scale_surgery.checkpoint.files import write_text
from scale_surgery.errors import CheckpointError, Problem
from scale_surgery.visible import visible_line


def fill(template: str, **content: object) -> str:
    """Make a page of HTML: fill the gaps of a template by their names."""
    from jinja2 import Environment, PackageLoader, StrictUndefined

    environment = Environment(
        loader=PackageLoader("scale_surgery.show"),
        autoescape=True,
        finalize=_shown,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
    )
    # JSON keeps the order of its keys, and letters of any script as they are
    environment.policies["json.dumps_kwargs"] = {"ensure_ascii": False, "separators": (",", ":")}
    return environment.get_template(template).render(content)


def _shown(value: object) -> object:
    """A value as it fills a gap; ready markup stays as it is."""
    from markupsafe import Markup

    return visible_line(value) if isinstance(value, str) and not isinstance(value, Markup) else value


def write(page: str, file: Path) -> None:
    """Write a page, whole or not at all; an existing file is replaced."""
    try:
        write_text(file, page)
    except OSError as error:
        raise CheckpointError(Problem("path-unwritable", file, error=error.strerror or error)) from error
