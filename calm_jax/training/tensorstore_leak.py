"""Keeps the memory of a training flat under checkpoints, although TensorStore leaks.

TensorStore (0.1.75 to 0.1.86 were seen) keeps a reference to each value of a JSON object that it converts to Python, which is
then never freed. At each save Orbax converts TensorStore's metrics, for a line of its log, and the path of the checkpoint,
once for each array. For the 136 arrays of a quickstart some 100 KiB are lost in each save.
"""

import copy
import functools
import sys
from typing import Any

import tensorstore

# Specifications to remember; an item of a checkpoint has two.
_REMEMBERED = 64


def leaks() -> bool:
    """Whether the installed TensorStore keeps references to the values that it converts."""
    path = tensorstore.KvStore.Spec({"driver": "file", "path": "/a/"}).to_json().pop("path")
    # One is of `path`, one of the argument of `getrefcount`.
    return sys.getrefcount(path) > 2


@functools.cache
def avoid() -> None:
    """From now on this process converts each specification of a key-value store once, and no metrics, if TensorStore leaks.

    Nothing but the log of Orbax shows these metrics.
    """
    if not leaks():
        return
    convert = tensorstore.KvStore.Spec.to_json
    known: dict[tuple[str, bool], Any] = {}

    def to_json(spec: tensorstore.KvStore.Spec, include_defaults: bool = False) -> Any:
        key = repr(spec), include_defaults
        found = known.get(key)
        if found is None:
            if len(known) >= _REMEMBERED:
                known.clear()
            found = known[key] = convert(spec, include_defaults=include_defaults)
        return copy.deepcopy(found)

    def no_metrics(metric_prefix: str = "", include_zero_metrics: bool = False) -> list[Any]:
        return []

    replaced: Any = tensorstore
    replaced.KvStore.Spec.to_json = to_json
    replaced.experimental_collect_matching_metrics = no_metrics
