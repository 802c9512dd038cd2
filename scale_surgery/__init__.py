"""Expand Hugging Face checkpoints, prove that nothing changed, and take the expansion off again.

    from scale_surgery import Request, expand, strip, verify

    expand("base", Request(layers="last:4"), "expanded")
    verify("expanded").passed
    strip("expanded", "base-again")

Importing this package imports neither torch nor transformers. After `scale_surgery.register()` expanded models
load by transformers' auto classes without remote code.
"""

__version__ = "0.1.0"

from scale_surgery.apply import Applied, apply
from scale_surgery.errors import (
    CheckpointError,
    DataError,
    HubError,
    PlanError,
    SurgeryError,
    TrainingError,
    UnsupportedFamilyError,
)
from scale_surgery.evaluate import Evaluation, evaluate
from scale_surgery.expand import Expansion, expand
from scale_surgery.extract import Extracted, extract
from scale_surgery.freeze import expansion_disabled, freeze_base
from scale_surgery.inspect import Inspection, inspect
from scale_surgery.load_expansion import load_expansion
from scale_surgery.merge import Merged, merge
from scale_surgery.modeling import register
from scale_surgery.pilot_settings import PilotSettings
from scale_surgery.plan import Plan, plan
from scale_surgery.push import Push, Pushed, push
from scale_surgery.rank_layers import rank_layers
from scale_surgery.ranking import Ranking
from scale_surgery.report import report
from scale_surgery.report_records import Report
from scale_surgery.request import Request
from scale_surgery.route import Routed, route_export, set_routing, unroute
from scale_surgery.route_calibrate import Calibration, route_calibrate
from scale_surgery.route_records import RouteReport
from scale_surgery.route_report import route_report
from scale_surgery.routing_specs import Routing
from scale_surgery.settings import TrainingSettings
from scale_surgery.strip import Stripped, strip
from scale_surgery.train import Training, train
from scale_surgery.verify import Promise, Verification, verify

__all__ = [
    "Applied",
    "Calibration",
    "CheckpointError",
    "DataError",
    "Evaluation",
    "Expansion",
    "Extracted",
    "HubError",
    "Inspection",
    "Merged",
    "PilotSettings",
    "Plan",
    "PlanError",
    "Promise",
    "Push",
    "Pushed",
    "Ranking",
    "Report",
    "Request",
    "RouteReport",
    "Routed",
    "Routing",
    "Stripped",
    "SurgeryError",
    "Training",
    "TrainingError",
    "TrainingSettings",
    "UnsupportedFamilyError",
    "Verification",
    "__version__",
    "apply",
    "evaluate",
    "expand",
    "expansion_disabled",
    "extract",
    "freeze_base",
    "inspect",
    "load_expansion",
    "merge",
    "plan",
    "push",
    "rank_layers",
    "register",
    "report",
    "route_calibrate",
    "route_export",
    "route_report",
    "set_routing",
    "strip",
    "train",
    "unroute",
    "verify",
]
