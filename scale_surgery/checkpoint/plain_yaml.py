"""YAML that keeps numbers and dates as text. The type of each setting determines the conversion.

YAML 1.1 silently reads 0200 as 128, 1:30 as 90 and the revision 1.10 as 1.1.
"""

from __future__ import annotations

import yaml

LEFT_AS_TYPED = {f"tag:yaml.org,2002:{kind}" for kind in ("int", "float", "timestamp")}


class PlainLoader(yaml.SafeLoader):
    """A loader of lists, mappings, strings, true, false and null."""


PlainLoader.yaml_implicit_resolvers = {
    first: [(tag, pattern) for tag, pattern in resolvers if tag not in LEFT_AS_TYPED]
    for first, resolvers in yaml.SafeLoader.yaml_implicit_resolvers.items()
}
