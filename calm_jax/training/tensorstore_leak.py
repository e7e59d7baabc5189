"""Keeps the memory of a training flat under checkpoints, although TensorStore leaks.

TensorStore (observed in versions 0.1.75 to 0.1.86) keeps a reference to each value of a JSON object that it converts to
Python, so the value is never freed. At each save Orbax converts TensorStore's metrics, for a line of its log, and the path
of the checkpoint, once for each array. For the 136 arrays of a quickstart some 100 KiB are lost in each save.
"""

import copy
import functools
import sys
from typing import Any

import tensorstore

# The number of specifications whose conversion is cached; an item of a checkpoint has two.
_REMEMBERED = 64


def leaks() -> bool:
    """Whether the installed TensorStore keeps references to the values that it converts."""
    converted = tensorstore.KvStore.Spec({"driver": "file", "path": "/a/"}).to_json()
    # A string to which there are as many references as to `path` without a leak, however the interpreter counts them.
    path, other = converted.pop("path"), "".join(["/a", "/"])
    return sys.getrefcount(path) > sys.getrefcount(other)


@functools.cache
def avoid() -> None:
    """If TensorStore leaks, patches it for the rest of this process, so that it converts less.

    The JSON of each key-value store's specification is cached, and metrics are not converted; only Orbax's log and its scalars
    for `jax.monitoring` show them.
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
