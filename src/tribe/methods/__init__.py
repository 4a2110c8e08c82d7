"""Methods: how a classifier adapts while it predicts. Each is one file, a frozen dataclass of hyper-parameters.

To add one, put a file beside this one, with `@register("name")`; it imports what it needs from here. See CONTRIBUTING.
"""

from tribe.core import all_weights, losses, memory, optim
from tribe.core.all_weights import Parameters, WeightLayout
from tribe.core.augment import Augment, View, view
from tribe.core.backbone import Backbone, Output
from tribe.core.graphs import segment
from tribe.core.memory import ROOM, Reservoir, Timely
from tribe.core.moments import accumulation_dtype
from tribe.core.rng import Key
from tribe.core.rules import Frozen, PerBatch
from tribe.core.state import Affine, Info, Stats, clone, rows_of, select, tree_map
from tribe.knowledge import (
    Knowledge,
    KnowledgeError,
    KnowledgeLike,
    checked_tensors,
    require_labels,
    study_batches,
)
from tribe.methods.base import EntropyMethod, EntropyState, MemoryMethod
from tribe.methods.method import (
    Deployed,
    Method,
    check_classes,
    check_fits,
    count_classes,
    features_of,
    register,
    registry,
    require_features,
)
from tribe.methods.naming import ParsedName, classes_of, create, field_names, get, names, parse, variants
from tribe.methods.pipeline import (
    AnyMethod,
    EmptyState,
    Pipeline,
    PipelineState,
    get_fields,
    guards,
    predict_and_advance,
    with_fields,
)
from tribe.methods.stepping import (
    Agreement,
    ScreenedBatch,
    Update,
    distance_of,
    finite,
    gradient_step,
    mask_logits,
    screen,
)
from tribe.norms import Norm
from tribe.norms.balanced import Balanced
from tribe.norms.batch import Robust
from tribe.norms.instance import Instance
from tribe.norms.named import from_text as norm_from_text

__all__ = [
    "ROOM",
    "Affine",
    "Agreement",
    "AnyMethod",
    "Augment",
    "Backbone",
    "Balanced",
    "Deployed",
    "EmptyState",
    "EntropyMethod",
    "EntropyState",
    "Frozen",
    "Info",
    "Instance",
    "Key",
    "Knowledge",
    "KnowledgeError",
    "KnowledgeLike",
    "MemoryMethod",
    "Method",
    "Norm",
    "Output",
    "Parameters",
    "ParsedName",
    "PerBatch",
    "Pipeline",
    "PipelineState",
    "Reservoir",
    "Robust",
    "ScreenedBatch",
    "Stats",
    "Timely",
    "Update",
    "View",
    "WeightLayout",
    "accumulation_dtype",
    "all_weights",
    "check_classes",
    "check_fits",
    "checked_tensors",
    "classes_of",
    "clone",
    "count_classes",
    "create",
    "distance_of",
    "features_of",
    "field_names",
    "finite",
    "get",
    "get_fields",
    "gradient_step",
    "guards",
    "losses",
    "mask_logits",
    "memory",
    "names",
    "norm_from_text",
    "optim",
    "parse",
    "predict_and_advance",
    "register",
    "registry",
    "require_features",
    "require_labels",
    "rows_of",
    "screen",
    "segment",
    "select",
    "study_batches",
    "tree_map",
    "variants",
    "view",
    "with_fields",
]

registry.load(__name__, __path__)  # last: method files import the names above from here
