"""Methods: how a classifier adapts while it predicts. Each is one file, a frozen dataclass of hyper-parameters.

To add one, put a file beside this one, with `@register("name")`; what most methods need can be imported from here. See
CONTRIBUTING.
"""

from tribe.core import losses, optim
from tribe.core.backbone import Backbone
from tribe.core.rng import Key
from tribe.core.rules import Frozen, PerBatch
from tribe.core.state import Affine, Info, Stats
from tribe.methods.base import EntropyMethod, MemoryMethod
from tribe.methods.building import classes_of, create, field_names, get, names, parse, variants
from tribe.methods.method import Deployed, Method, check_classes, check_fits, count_classes, register, registry
from tribe.methods.pipeline import AnyMethod, EmptyState, Pipeline, PipelineState, get_fields, guards, with_fields
from tribe.methods.stepping import ScreenedBatch, Update, finite, mask_logits, report_agreement, screen
from tribe.norms.batch import Robust

__all__ = [
    "Affine",
    "AnyMethod",
    "Backbone",
    "Deployed",
    "EmptyState",
    "EntropyMethod",
    "Frozen",
    "Info",
    "Key",
    "MemoryMethod",
    "Method",
    "PerBatch",
    "Pipeline",
    "PipelineState",
    "Robust",
    "ScreenedBatch",
    "Stats",
    "Update",
    "check_classes",
    "check_fits",
    "classes_of",
    "count_classes",
    "create",
    "field_names",
    "finite",
    "get",
    "get_fields",
    "guards",
    "losses",
    "mask_logits",
    "names",
    "optim",
    "parse",
    "register",
    "registry",
    "report_agreement",
    "screen",
    "variants",
    "with_fields",
]

registry.load(__name__, __path__)  # last: method files import the names above from here
