"""Computes the bytes that a device reads from and writes to its main memory in a compiled program, from its HLO text.

XLA's own cost analysis counts a loop's body once and is missing for some compilers. Here every operation that is not part
of a fusion reads its operands from main memory and writes its results there; inside of a fusion nothing is moved.
"""

import dataclasses
import re
from collections.abc import Iterator, Mapping

from calm_jax.planning.hlo import (
    Instruction,
    Program,
    array_bytes,
    operands,
    tuple_parts,
)

# Operations that move nothing: names for arrays that exist, and ends of asynchronous operations, counted at their start.
_FREE = {
    *("parameter", "constant", "tuple", "get-tuple-element", "bitcast", "after-all", "opt-barrier"),
    *("partition-id", "replica-id", "async-update", "async-done"),
    # For these, the operations of the computations that they run are counted instead.
    *("while", "conditional", "call", "async-start"),
}
_SLICES = ("dynamic-slice", "slice", "gather")
# In a fusion, these give an array of the same elements without storing it.
_VIEWS = ("bitcast", "reshape", "transpose", "copy", "convert")
# The mark, in a layout, of an array that is not in main memory, but for example in a TPU's vector memory.
_OTHER_MEMORY = re.compile(r"S\([1-9]\d*\)")


@dataclasses.dataclass(frozen=True)
class Operation:
    """One operation of a program outside of fusions.

    Attributes:
      name: the name of its result in the HLO text.
      opcode: HLO's opcode.
      read, written: bytes that one run reads from and writes to main memory.
      times: how often the program runs it.
      scope: HLO's op_name, which has the `jax.named_scope`s.
    """

    name: str
    opcode: str
    read: float
    written: float
    times: int
    scope: str

    @property
    def moved(self) -> float:
        """Bytes read and written in all runs."""
        return self.times * (self.read + self.written)


def operations(program: Program, unknown_trips: int = 1) -> list[Operation]:
    """Every operation of a program that moves bytes, those that move most first.

    - A slice or gather reads what it takes. An update of a slice (dynamic-update-slice, scatter) happens in place: it
      reads and writes as many bytes as the update has. Where the compiler cannot update in place, it has put an explicit
      copy before the update, which counts.
    - Layouts on a TPU may pad arrays; the padding is not counted.
    - A loop whose number of iterations is unknown, such as that over the chunks of a generation, counts `unknown_trips`
      times. All branches of a conditional count.
    """
    times, _ = program.runs(unknown_trips)
    found = []
    for name in _unfused(program):
        body = {one.name: one for one in program.computations.get(name, ())}
        for one in body.values():
            if one.opcode in _FREE or one.opcode.endswith("-done"):
                continue
            read, written = _moved(program, one, body)
            if read + written and times[name]:
                scope = re.search(r'op_name="([^"]*)"', one.rest)
                found.append(
                    Operation(
                        one.name,
                        one.opcode,
                        read,
                        written,
                        times[name],
                        scope[1] if scope else "",
                    )
                )
    return sorted(found, key=lambda one: -one.moved)


def bytes_moved(program: Program, unknown_trips: int = 1) -> float:
    """Bytes that a run of the program reads from and writes to main memory (`operations`)."""
    return sum(one.moved for one in operations(program, unknown_trips))


def _unfused(program: Program) -> Iterator[str]:
    """The computations whose operations store their results: the entry's, loops', branches' and calls'."""
    seen, waiting = {program.entry}, [program.entry]
    while waiting:
        name = waiting.pop()
        yield name
        for one in program.computations.get(name, ()):
            if one.opcode in ("while", "conditional", "call", "async-start"):
                new = set(one.called) - seen
                seen |= new
                waiting += sorted(new)


def _stored(shape: str) -> float:
    """Bytes of the arrays of a shape that are in main memory."""
    return sum(array_bytes(part) for part in _arrays(shape) if not _OTHER_MEMORY.search(part))


def _arrays(shape: str) -> list[str]:
    """The arrays of a shape, also those of tuples in a tuple."""
    parts = tuple_parts(shape)
    return [array for part in parts for array in (_arrays(part) if "(" in part[:1] else [part])]


def _moved(
    program: Program, one: Instruction, body: Mapping[str, Instruction]
) -> tuple[float, float]:
    """The bytes that an operation reads and writes in one run."""
    # An operand that is given twice is read once.
    given = [body[name] for name in dict.fromkeys(operands(one)) if name in body]
    if one.opcode == "fusion":
        [inner] = one.called
        names = operands(one)
        shares: dict[str, float] = {}
        for index, name in enumerate(names):
            shares[name] = min(1.0, shares.get(name, 0.0) + _share_read(program, inner, index))
        read = sum(shares[other.name] * _stored(other.shape) for other in given)
        again, written = _written(program, inner, one.shape)
        return read + again, written
    if one.opcode in _SLICES:
        taken = array_bytes(one.shape)
        indices = sum(_stored(other.shape) for other in given[1:])
        return (taken if given and _stored(given[0].shape) else 0.0) + indices, _stored(one.shape)
    if one.opcode in ("dynamic-update-slice", "scatter"):
        again, written = _updated(one, body, one.shape)
        return again + sum(_stored(other.shape) for other in given[1:]), written
    if one.opcode.endswith("-start") and one.opcode != "all-reduce-start":
        # The shape holds operands and results: what is read, and what is written.
        return _stored(one.shape), 0.0
    results = tuple_parts(one.shape)
    if one.opcode == "custom-call":
        if "AllocateBuffer" in one.rest:
            return 0.0, 0.0
        # If there are several results and the last one is an array of bytes, that one is scratch memory.
        if len(results) > 1 and re.match(r"[su]8\[", results[-1]):
            results = results[:-1]
    read = sum(_stored(other.shape) for other in given)
    return read, sum(map(_stored, results))


def _updated(one: Instruction, body: Mapping[str, Instruction], shape: str) -> tuple[float, float]:
    """The bytes that an update in place reads and writes besides its operands; `shape` is that of the updated array."""
    names = operands(one)
    # The operands of a scatter of n arrays are the n arrays, the indices and the n updates.
    updates = names[1:2] if one.opcode == "dynamic-update-slice" else names[len(names) // 2 + 1 :]
    size = sum(array_bytes(body[name].shape) for name in updates) if _stored(shape) else 0.0
    # A scatter may add to the elements that it updates, so it reads them too.
    return (size if one.opcode == "scatter" else 0.0), size


def _share_read(program: Program, name: str, index: int) -> float:
    """The share of parameter `index` that a fused computation reads."""
    body = {one.name: one for one in program.computations.get(name, ())}
    given = next(
        (
            one
            for one in body.values()
            if one.opcode == "parameter" and one.rest.partition(")")[0] == str(index)
        ),
        None,
    )
    in_place = {one.name for one in _roots(body) if _target(one, body)}

    def share(of: Instruction) -> float:
        total = 0.0
        for user in body.values():
            names = operands(user) if user.opcode not in ("parameter", "constant") else []
            for place, other in enumerate(names):
                if other != of.name:
                    continue
                if user.opcode in _SLICES and not place:
                    total += array_bytes(user.shape) / array_bytes(of.shape)
                elif user.opcode in _VIEWS:
                    total += share(user)
                elif user.opcode == "fusion":
                    total += _share_read(program, user.called[0], place)
                elif not (user.name in in_place and not place):
                    total += 1.0
        # If the fusion's result is a view of the operand, the operand is read whole, even without another use.
        return min(1.0, total + (of.is_root and of.opcode != "parameter"))

    return share(given) if given is not None and array_bytes(given.shape) else 0.0


def _roots(body: Mapping[str, Instruction]) -> list[Instruction]:
    """The instructions of a fused computation whose results it stores, without bitcasts around them."""
    root = next((one for one in body.values() if one.is_root), None)
    if root is None:
        return []
    found = [body[name] for name in operands(root)] if root.opcode == "tuple" else [root]
    return [_behind(one, body) for one in found]


def _behind(one: Instruction, body: Mapping[str, Instruction]) -> Instruction:
    while one.opcode == "bitcast":
        one = body[operands(one)[0]]
    return one


def _target(one: Instruction, body: Mapping[str, Instruction]) -> bool:
    """Whether an instruction of a fusion updates one of the fusion's operands in place."""
    if one.opcode not in ("dynamic-update-slice", "scatter"):
        return False
    return _behind(body[operands(one)[0]], body).opcode == "parameter"


def _written(program: Program, name: str, shape: str) -> tuple[float, float]:
    """The bytes of its results that a fusion reads (to add to them) and writes."""
    body = {one.name: one for one in program.computations.get(name, ())}
    roots, read, written = _roots(body), 0.0, 0.0
    # One root, such as a reduction of several arrays, may have a tuple as its result.
    parts = tuple_parts(shape) if len(roots) > 1 else [shape]
    for root, part in zip(roots, parts, strict=True):
        if root.opcode == "fusion":
            more, size = _written(program, root.called[0], part)
        elif _target(root, body):
            more, size = _updated(root, body, part)
        else:
            more, size = 0.0, _stored(part)
        read, written = read + more, written + size
    return read, written
