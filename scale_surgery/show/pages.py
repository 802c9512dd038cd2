"""HTML pages from templates: what comes from a file is escaped, and a gap that nothing fills is an error."""

from __future__ import annotations


def fill(template: str, **content: object) -> str:
    """Make a page.

    Args:
        template: File name of its template.
        content: What its gaps are filled with, by name.

    Returns:
        HTML.
    """
    from jinja2 import Environment, PackageLoader, StrictUndefined

    environment = Environment(
        loader=PackageLoader("scale_surgery.show"),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
    )
    # JSON keeps the order of its keys, and letters of any script as they are
    environment.policies["json.dumps_kwargs"] = {"ensure_ascii": False, "separators": (",", ":")}
    return environment.get_template(template).render(content)
