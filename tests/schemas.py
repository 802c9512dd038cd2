"""JSON Schemas of what commands print with --json, and of surgery.json, from the dataclasses.

`python -m tests.schemas` writes docs/schemas/: a file for each command, `error.json` and `surgery.json`.

The JSON of a result has its fields, and of some classes also values that follow from them: DERIVED lists their
properties, whose annotations give the types. A number that JSON cannot hold is one of the texts in NO_NUMBER.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any, get_type_hints

from pydantic import ConfigDict, TypeAdapter
from pydantic.json_schema import GenerateJsonSchema, JsonSchemaMode
from typing_extensions import TypedDict

import scale_surgery
from scale_surgery.comparing.comparison import Comparison
from scale_surgery.evidence import report_records, verification
from scale_surgery.evidence.answer_scores import AnswerScore
from scale_surgery.evidence.probe_scores import GroupCount
from scale_surgery.evidence.probes import Layer, Numbers
from scale_surgery.evidence.report_records import BlockChange, Norms, TensorChange
from scale_surgery.evidence.verification import Verification
from scale_surgery.folder.record import StoredManifest
from scale_surgery.modeling.expanded_routers import ROUTERS, Router
from scale_surgery.routing import records
from scale_surgery.routing.outcome import Outcome
from scale_surgery.routing.records import RouteReport
from scale_surgery.running.loss import Measurement
from scale_surgery.running.options import Dtype
from scale_surgery.talking.records import Answer
from scale_surgery.talking.serve import Served
from scale_surgery.training.ranking import Ranking

FOLDER = Path(__file__).parents[1] / "docs" / "schemas"
DRAFT = "https://json-schema.org/draft/2020-12/schema"
NO_NUMBER = ["NaN", "Infinity", "-Infinity"]
# properties that JSON has beside the fields of a class; those in OPTIONAL only in some places
DERIVED: dict[type, tuple[str, ...]] = {
    Answer: ("text", "routed_share"),
    Comparison: ("chosen",),
    AnswerScore: ("ended_share", "repeating_share", "other_share"),
    GroupCount: ("share", "kept_share", "lost_share"),
    Measurement: ("nats_per_token", "accuracy", "perplexity", "bits_per_byte"),
    Norms: ("relative_change", "relative_norm", "change_of_base"),
    Outcome: ("bound", "bound_per_token"),
    Ranking: ("tie", "warnings"),
}
OPTIONAL = {"perplexity", "bits_per_byte", "lost_share"}
# properties of other classes
ELSEWHERE: dict[str, Any] = {"lost_share": float | None}
# fields that JSON lacks, and a field whose own fields stand in its place
OMITTED: dict[type, str] = {Verification: "recorded"}
JOINED: dict[type, str] = {TensorChange: "norms", BlockChange: "norms"}


# annotations of these modules name classes that they import for type checkers alone
vars(report_records).update(Layer=Layer, Router=Router)
vars(records).update(Dtype=Dtype)
vars(verification).update(Numbers=Numbers)


class Totals(TypedDict):
    """A file in the result of `route-report`."""

    file: str
    documents: int
    tokens: int
    base_nats_per_token: float
    nats_per_token: dict[str, float]
    shares: dict[str, float]
    routed_nats_per_token: float


class Detail(TypedDict):
    """A problem in an error, as plain values."""

    code: str
    where: str
    found: str
    expected: str
    fix: str
    details: list[dict[str, Any]]


class Failure(TypedDict):
    """An error with --json."""

    error: str
    problems: list[Detail]


class RouteJson(TypedDict):
    """The properties of `route-report` that are no fields of its class."""

    files: list[Totals]
    tokens: list[dict[str, Any]]


class Generator(GenerateJsonSchema):
    """The schema of what `to_json` makes of a result."""

    def float_schema(self, schema: Any) -> dict[str, Any]:
        """Allow the texts of numbers that JSON cannot hold."""
        number = super().float_schema(schema)
        return number if self.mode == "validation" else {"anyOf": [number, {"enum": NO_NUMBER}]}

    def is_instance_schema(self, schema: Any) -> dict[str, Any]:
        """Describe a router by its name; its numbers are its own."""
        assert schema["cls"] is Router, schema["cls"]
        return {
            "type": "object",
            "properties": {"router": {"enum": sorted(ROUTERS)}},
            "required": ["router"],
            "additionalProperties": True,
        }

    def dataclass_schema(self, schema: Any) -> dict[str, Any]:
        """Add derived values of a class, and take away what its JSON lacks."""
        made = super().dataclass_schema(schema)
        owner = schema["cls"]
        for name in DERIVED.get(owner, ()):
            self._add(made, name, ELSEWHERE[name] if name in ELSEWHERE else type_of(owner, name))
        if owner is RouteReport:
            for name, kind in get_type_hints(RouteJson).items():
                self._add(made, name, kind)
        if (omitted := OMITTED.get(owner) or JOINED.get(owner)) is not None:
            del made["properties"][omitted]
            made["required"].remove(omitted)
        if owner in JOINED:
            for name, kind in get_type_hints(Norms).items():
                self._add(made, name, kind)
            for name in DERIVED[Norms]:
                self._add(made, name, type_of(Norms, name))
        return made

    def _add(self, made: dict[str, Any], name: str, kind: Any) -> None:
        made["properties"][name] = self.generate_inner(TypeAdapter(kind).core_schema)
        if name not in OPTIONAL and name not in made.setdefault("required", []):
            made["required"].append(name)


def type_of(owner: type, name: str) -> Any:
    """Return the type of a property."""
    return get_type_hints(getattr(owner, name).fget)["return"]


def results() -> Iterator[tuple[str, Any]]:
    """Yield each command with the class of its result."""
    for name in sorted(scale_surgery.__all__):
        command = name.replace("_", "-")
        if command in COMMANDS:
            yield command, get_type_hints(getattr(scale_surgery, name))["return"]
    yield "serve", Served


COMMANDS = """
    adopt apply compare compose evaluate expand extract generate hold-out inspect learn merge plan push rank-layers
    report route-calibrate route-export route-report strip train verify
""".split()  # noqa: SIM905  (a list of words)


def schema_of(kind: Any, title: str, mode: JsonSchemaMode = "serialization") -> dict[str, Any]:
    """Return the schema of a class."""
    config = ConfigDict(arbitrary_types_allowed=True, json_schema_serialization_defaults_required=True)
    if mode == "validation":
        config |= ConfigDict(extra="forbid")
    # settings go to the dataclasses inside
    adapter = TypeAdapter(tuple[kind], config=config)
    made = adapter.json_schema(schema_generator=Generator, mode=mode)
    return {"$schema": DRAFT, "title": title, **made["prefixItems"][0], "$defs": made.get("$defs", {})}


def schemas() -> dict[str, dict[str, Any]]:
    """Return each schema by the name of its file."""
    made = {f"{name}.json": schema_of(kind, f"scale-surgery {name} --json") for name, kind in results()}
    made["error.json"] = schema_of(Failure, "An error of any command with --json")
    made["surgery.json"] = schema_of(StoredManifest, "surgery.json of an expanded folder", "validation")
    return made


def closed(schema: Any) -> Any:
    """Return a schema that allows no other keys, so that a key which a schema lacks is noticed."""
    if isinstance(schema, list):
        return [closed(part) for part in schema]
    if not isinstance(schema, dict):
        return schema
    inner = {key: closed(value) for key, value in schema.items()}
    return {"additionalProperties": False, **inner} if isinstance(inner.get("properties"), dict) else inner


def as_text(schema: dict[str, Any]) -> str:
    """Return a schema as the text of its file."""
    return json.dumps(schema, indent=1, ensure_ascii=False, sort_keys=True) + "\n"


if __name__ == "__main__":
    FOLDER.mkdir(exist_ok=True)
    for name, schema in schemas().items():
        (FOLDER / name).write_text(as_text(schema), encoding="utf-8")
