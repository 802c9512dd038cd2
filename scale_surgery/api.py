"""Public names of the package, which imports this module on the first use of a name."""

from importlib.metadata import version

from scale_surgery.comparing.compare import compare
from scale_surgery.comparing.comparison import Comparison
from scale_surgery.comparing.settings import CompareSettings
from scale_surgery.deriving.planned import load_plan, plan
from scale_surgery.errors import (
    CheckpointError,
    DataError,
    HubError,
    PlanError,
    ServingError,
    SurgeryError,
    TrainingError,
    UnsupportedFamilyError,
)
from scale_surgery.evidence.evaluate import Evaluation, evaluate
from scale_surgery.evidence.evaluate_settings import EvaluationSettings
from scale_surgery.evidence.inspect import ExpansionSummary, FolderSummary, Inspection, inspect
from scale_surgery.evidence.promises import Promise
from scale_surgery.evidence.report import report
from scale_surgery.evidence.report_records import Report
from scale_surgery.evidence.verification import Verification
from scale_surgery.evidence.verify import verify
from scale_surgery.hub.push import Pushed, push
from scale_surgery.hub.settings import Push
from scale_surgery.learning.hold_out import HeldOut, HoldOutSettings, hold_out
from scale_surgery.learning.learn import learn, resolve_recipe
from scale_surgery.learning.learned import Learned
from scale_surgery.learning.recipe import Recipe
from scale_surgery.learning.recipe_file import read_recipe, write_recipe
from scale_surgery.modeling import register
from scale_surgery.modeling.expanded_routers import CosineRouter, PosteriorRouter
from scale_surgery.planning.new_tokens import NewTokens, TokenSource
from scale_surgery.planning.plan import Plan
from scale_surgery.planning.request import Request
from scale_surgery.routing.calibrate import route_calibrate
from scale_surgery.routing.calibration import Calibration
from scale_surgery.routing.choice import CalibrationSettings
from scale_surgery.routing.records import RouteReport
from scale_surgery.routing.report import route_report
from scale_surgery.running.freeze import expansion_disabled, freeze_base
from scale_surgery.running.learned_tokens import ChosenTokens
from scale_surgery.running.new_tokens import find_new_tokens
from scale_surgery.running.options import Probes, RunOptions
from scale_surgery.running.strength import set_strength
from scale_surgery.surgery.adopt import Adopted, adopt
from scale_surgery.surgery.apply import Applied, GivenBase, apply
from scale_surgery.surgery.compose import Composed, compose
from scale_surgery.surgery.expand import Expansion, expand
from scale_surgery.surgery.extract import Extracted, extract
from scale_surgery.surgery.load_expansion import load_expansion
from scale_surgery.surgery.merge import Merged, MergedPart, merge
from scale_surgery.surgery.route import Routed, route_export, set_routing, unroute
from scale_surgery.surgery.strip import Stripped, strip
from scale_surgery.talking.generate import generate
from scale_surgery.talking.records import Answer, Generation
from scale_surgery.talking.serve import Address, Served, serve
from scale_surgery.talking.settings import GenerationSettings
from scale_surgery.training.rank_layers import rank_layers
from scale_surgery.training.ranking import Ranking, RankingSettings
from scale_surgery.training.result import Training
from scale_surgery.training.settings import EvalData, TrainingSettings, TrainingStart
from scale_surgery.training.train import train

__version__ = version("scale-surgery")

__all__ = [
    "Address",
    "Adopted",
    "Answer",
    "Applied",
    "Calibration",
    "CalibrationSettings",
    "CheckpointError",
    "ChosenTokens",
    "CompareSettings",
    "Comparison",
    "Composed",
    "CosineRouter",
    "DataError",
    "EvalData",
    "Evaluation",
    "EvaluationSettings",
    "Expansion",
    "ExpansionSummary",
    "Extracted",
    "FolderSummary",
    "Generation",
    "GenerationSettings",
    "GivenBase",
    "HeldOut",
    "HoldOutSettings",
    "HubError",
    "Inspection",
    "Learned",
    "Merged",
    "MergedPart",
    "NewTokens",
    "Plan",
    "PlanError",
    "PosteriorRouter",
    "Probes",
    "Promise",
    "Push",
    "Pushed",
    "Ranking",
    "RankingSettings",
    "Recipe",
    "Report",
    "Request",
    "RouteReport",
    "Routed",
    "RunOptions",
    "Served",
    "ServingError",
    "Stripped",
    "SurgeryError",
    "TokenSource",
    "Training",
    "TrainingError",
    "TrainingSettings",
    "TrainingStart",
    "UnsupportedFamilyError",
    "Verification",
    "__version__",
    "adopt",
    "apply",
    "compare",
    "compose",
    "evaluate",
    "expand",
    "expansion_disabled",
    "extract",
    "find_new_tokens",
    "freeze_base",
    "generate",
    "hold_out",
    "inspect",
    "learn",
    "load_expansion",
    "load_plan",
    "merge",
    "plan",
    "push",
    "rank_layers",
    "read_recipe",
    "register",
    "report",
    "resolve_recipe",
    "route_calibrate",
    "route_export",
    "route_report",
    "serve",
    "set_routing",
    "set_strength",
    "strip",
    "train",
    "unroute",
    "verify",
    "write_recipe",
]
