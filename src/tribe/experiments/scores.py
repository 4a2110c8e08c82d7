"""The scores of a record, as metrics.json holds them, and what such a file must look like."""

import math
from collections.abc import Sequence
from typing import Any

from tribe.experiments import metrics
from tribe.experiments.record import Record
from tribe.io.json_files import Where

COUNT = Where(int, lambda count: 0 <= count < 2**53, "a number of images")
SHARE = Where(float, lambda share: -1e-6 <= share <= 1 + 1e-6, "a share, from 0 to 1")
SECONDS = Where(float, lambda seconds: 0 <= seconds < 1e12, "a time in seconds")
SCORES = Where(
    {
        "images": COUNT,
        **dict.fromkeys(
            ("instance_error", "category_error", "category_error_absent_correct", "calibration_error"), (SHARE, None)
        ),
        "domain_error": {...: (SHARE, None)},
        "class_counts": Where(
            {...: [COUNT]},
            lambda counts: len({len(row) for row in counts.values()}) <= 1,
            "as many classes of each domain",
        ),
    },
    lambda scores: scores["domain_error"].keys() == scores["class_counts"].keys(),
    "domain_error and class_counts of the same domains",
)


def scores_of(records: Sequence[Record]) -> dict[str, dict[str, Any]]:
    """The metrics of records, by seed."""
    return {str(record.spec["seed"]): record_scores(record) for record in records}


def record_scores(record: Record) -> dict[str, Any]:
    """The metrics of one record, as metrics.json holds them."""
    scores: dict[str, Any] = {"images": len(record.label), **metrics.summary(record)}
    del scores["seconds_per_image"]  # it is in environment.json, as it is never the same twice
    scores = {name: None if value is not None and math.isnan(value) else value for name, value in scores.items()}
    if not bool((record.label >= 0).any()):
        return {**scores, "domain_error": {}, "class_counts": {}}
    errors = [None if math.isnan(error) else error for error in metrics.domain_error(record).tolist()]
    counts = metrics.class_counts(record).tolist()
    return {
        **scores,
        "domain_error": dict(zip(record.domains, errors, strict=True)),
        "class_counts": dict(zip(record.domains, counts, strict=True)),
    }
