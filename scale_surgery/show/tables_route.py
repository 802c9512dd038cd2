"""What results about routing look like; see `tables`."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rich.console import RenderableType

from scale_surgery.show.tables import facts, format_bytes

if TYPE_CHECKING:
    from scale_surgery.surgery.route import Routed


def render_routed(done: Routed) -> RenderableType:
    """A routed checkpoint, or one whose router was taken away."""
    parts = "in the head alone" if done.fork is None else f"from layer {done.fork} of {done.layers} on"
    rows = [("written", str(done.path)), ("base", done.base_name)]
    if done.routing is None:
        rows.append(("router", "none; as before route-export, and what was trained since"))
    else:
        rows += [
            ("router", done.routing.description),
            ("two paths", parts),
            ("cost", f"{done.cost:.2f} x the layers of a forward without a router, and the router's own"),
        ]
    rows.append(("shards", f"{format_bytes(done.bytes_written)} written, taken over as files"))
    rows += [("not taken along", ", ".join(done.left_out))] if done.left_out else []
    rows.append(("next", f"scale-surgery verify {done.path}"))
    return facts("not routed any more" if done.routing is None else "routed", rows)
