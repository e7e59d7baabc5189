"""Computes the bytes that a compiled program's devices exchange, from its HLO text.

XLA's own cost analysis counts a loop's body once; this module multiplies by the number of iterations.
"""

import collections
import dataclasses
import math
import re
from collections.abc import Mapping

import jax

# HLO's opcodes of collectives; an asynchronous one is a pair of opcodes that end in -start and -done.
KINDS = (
    "all-gather",
    "all-reduce",
    "reduce-scatter",
    "all-to-all",
    "ragged-all-to-all",
    "collective-broadcast",
    "collective-permute",
)


@dataclasses.dataclass(frozen=True)
class Collective:
    """One collective operation of a program.

    Attributes:
      kind: one of `KINDS`.
      shape: its result's shape in HLO's notation.
      full: bytes of the whole array, the shards of all devices together.
      group: number of devices that exchange with each other.
      times: how often one step runs it.
      scope: HLO's op_name, which has the `jax.named_scope`s.
    """

    kind: str
    shape: str
    full: float
    group: int
    times: int
    scope: str

    @property
    def moved(self) -> float:
        """Bytes that one device receives in a step, by ring algorithms.

        In an all-gather, a reduce-scatter or an all-to-all over n devices each receives (n - 1) / n of the array; an
        all-reduce is a reduce-scatter and an all-gather.
        """
        share = (self.group - 1) / self.group
        once = {"all-reduce": 2 * share, "collective-permute": 1}.get(self.kind, share) * self.full
        return self.times * once


@dataclasses.dataclass(frozen=True)
class Instruction:
    """A line of HLO: `name = shape opcode(rest`."""

    name: str
    shape: str
    opcode: str
    rest: str
    is_root: bool

    @property
    def called(self) -> list[str]:
        """The names of the computations that it runs."""
        called = _CALLED.findall(self.rest)
        for branches in _BRANCHES.findall(self.rest):
            called += [branch.strip().lstrip("%") for branch in branches.split(",")]
        return called


_HEADER = re.compile(r"^(ENTRY )?%?([\w.\-]+)(?: \(.*)? \{$")
_NAME = re.compile(r"^\s+(ROOT )?%?([\w.\-]+) = ")
_OPCODE = re.compile(r" ([a-z][\w\-]*)\(")
_ARRAY = re.compile(r"\b([a-z]+[0-9]*(?:e[0-9]+m[0-9]+\w*)?)\[([0-9,]*)\]")
_CALLED = re.compile(
    r"(?:calls|to_apply|body|condition|true_computation|false_computation)=%?([\w.\-]+)"
)
_BRANCHES = re.compile(r"(?:branch_computations|called_computations)=\{([^}]*)\}")
_KNOWN = re.compile(r'"?known_trip_count"?[:=]\s*\{\s*"?n"?[:=]\s*"?(\d+)')
_BITS = re.compile(r"(\d+)")


def _size(kind: str, dims: str) -> float:
    """Bytes of an array by its element type and sizes, such as "bf16" and "4,8"."""
    bits = {"pred": 8, "token": 0, "opaque": 0}.get(kind)
    if bits is None:
        found = _BITS.search(kind)
        bits = int(found[1]) if found else 8
    return bits / 8 * math.prod(int(size) for size in dims.split(",") if size)


def tuple_parts(shape: str) -> list[str]:
    """The shapes in the outermost tuple of a shape, with their layouts; for an array's shape, a list of that shape alone."""
    shape = re.sub(r"/\*.*?\*/", "", shape).strip()
    if not shape.startswith("("):
        return [shape]
    parts, depth = [""], 0
    for character in shape[1:-1]:
        depth += (character in "([{") - (character in ")]}")
        if character == "," and not depth:
            parts.append("")
        else:
            parts[-1] += character
    return [part.strip() for part in parts]


def array_bytes(shape: str) -> float:
    """Bytes of all arrays in a shape."""
    return sum(_size(*match) for match in _ARRAY.findall(shape))


def _closing(text: str) -> int:
    """The index of the parenthesis that closes the one at the beginning of `text`."""
    depth = 0
    for place, character in enumerate(text):
        depth += (character == "(") - (character == ")")
        if not depth:
            return place
    return 0


def _parse(line: str) -> Instruction | None:
    """The instruction in a line; None if it has none."""
    named = _NAME.match(line)
    if not named:
        return None
    text = line[named.end() :]
    # The shape of a tuple contains spaces and parentheses, its layouts too.
    end = _closing(text) if text.startswith("(") else 0
    found = _OPCODE.search(text, end)
    if not found:
        return None
    return Instruction(
        named[2], text[: found.start()], found[1], text[found.end() :], bool(named[1])
    )


@dataclasses.dataclass(frozen=True)
class Program:
    """A parsed HLO program.

    Attributes:
      computations: the instructions of each computation, by its name.
      entry: the name of the computation that the program starts with.
    """

    computations: Mapping[str, tuple[Instruction, ...]]
    entry: str

    @staticmethod
    def of_compiled(compiled: jax.stages.Compiled) -> "Program":
        """Parses the text of a compiled program."""
        text = compiled.as_text()
        assert text is not None
        return Program.of(text)

    @staticmethod
    def of(text: str) -> "Program":
        """Parses HLO text, which `jax.stages.Compiled.as_text()` returns."""
        computations: dict[str, list[Instruction]] = {}
        entry, current = "", None
        for line in text.splitlines():
            header = None if line.startswith(" ") else _HEADER.match(line)
            if header:
                current = computations.setdefault(header[2], [])
                entry = header[2] if header[1] else entry
            elif current is not None:
                instruction = _parse(line)
                if instruction:
                    current.append(instruction)
        return Program({name: tuple(body) for name, body in computations.items()}, entry)

    def _trips(self, loop: Instruction, body: Mapping[str, Instruction]) -> int | None:
        """The number of iterations of a `while` in `body`; None if it cannot be found.

        It is the compiler's known_trip_count, or follows from the counter's start, step and end.
        """
        known = _KNOWN.search(loop.rest)
        if known:
            return int(known[1])
        condition, inner = (self._named(loop, part) for part in ("condition", "body"))
        compare = self._root(condition)
        if compare is not None and compare.opcode == "fusion":
            # The compiler may put the comparison of counter and end into a fusion, and the end with it as a constant.
            compare = self._compared(compare, condition)
        if compare is None or "direction=LT" not in compare.rest:
            return None
        counter, end = (condition.get(name) for name in operands(compare)[:2])
        if counter is None or end is None or counter.opcode != "get-tuple-element":
            return None
        index, last = _index(counter), _number(end)
        root = self._root(inner)
        if last is None or root is None or root.opcode != "tuple":
            return None
        step = _step(inner, operands(root)[index], index)
        start = _start(body, loop, index)
        return None if not step else max(0, -(-(last - start) // step))

    def _compared(
        self, fusion: Instruction, condition: dict[str, Instruction]
    ) -> Instruction | None:
        """The comparison that a fusion computes, with the names that its operands have in `condition`.

        Constants of the fusion are added to `condition`, which has the instructions around the fusion.
        """
        inner = self._named(fusion, "calls")
        root = self._root(inner)
        if root is None or root.opcode != "compare":
            return None
        outside = []
        for name in operands(root):
            operand = inner[name]
            if operand.opcode == "parameter":
                outside.append(operands(fusion)[int(operand.rest.split(")")[0])])
            else:
                # A constant inside of the fusion; names are unique in a program.
                condition[name] = operand
                outside.append(name)
        return dataclasses.replace(
            root, rest=", ".join(outside) + ")" + root.rest.partition(")")[2]
        )

    def _named(self, instruction: Instruction, part: str) -> dict[str, Instruction]:
        """The computation that an instruction has as its attribute `part`, as instructions by name."""
        found = re.search(rf"\b{part}=%?([\w.\-]+)", instruction.rest)
        return {one.name: one for one in self.computations[found[1]]} if found else {}

    @staticmethod
    def _root(body: Mapping[str, Instruction]) -> Instruction | None:
        return next((one for one in body.values() if one.is_root), None)

    def runs(self, unknown_trips: int = 1) -> tuple[dict[str, int], tuple[str, ...]]:
        """How often one step runs each computation.

        Args:
          unknown_trips: the number of iterations of loops for which it cannot be found.

        Returns:
          The number of runs by computation, and the names of the loops whose number of iterations is unknown.
        """
        times: dict[str, int] = collections.Counter()
        unknown: list[str] = []

        def visit(name: str, count: int) -> None:
            times[name] += count
            body = {one.name: one for one in self.computations.get(name, ())}
            for instruction in body.values():
                trips = 1
                if instruction.opcode == "while":
                    found = self._trips(instruction, body)
                    if found is None:
                        unknown.append(instruction.name)
                    trips = unknown_trips if found is None else max(1, found)
                for other in instruction.called:
                    visit(other, count * trips)

        visit(self.entry, 1)
        return dict(times), tuple(unknown)

    def collectives(self, num_devices: int) -> list[Collective]:
        """Every collective that a step runs on each of `num_devices` devices."""
        times, _ = self.runs()
        found: dict[str, Collective] = {}
        for name, count in times.items():
            for instruction in self.computations.get(name, ()):
                kind = instruction.opcode.removesuffix("-start")
                if kind not in KINDS or not count:
                    continue
                # On a TPU, one asynchronous collective may appear in each of a chain of fusions, with the same channel id. The
                # first and the last fusion run as often as the collective does; those between them may be in a loop. So the
                # smallest number of runs is that of the collective.
                channel = re.search(r"channel_id=(\d+)", instruction.rest)
                key = channel[1] if channel else f"{name}/{instruction.name}"
                least = min(count, found[key].times) if key in found else count
                found[key] = _collective(kind, instruction, least, num_devices)
        return list(found.values())


def operands(instruction: Instruction) -> list[str]:
    """The names of an instruction's operands."""
    return re.findall(r"%?([\w.\-]+)(?:,|$)", instruction.rest.partition(")")[0])


def _index(instruction: Instruction) -> int:
    """The tuple index of a get-tuple-element."""
    found = re.search(r"index=(\d+)", instruction.rest)
    assert found is not None
    return int(found[1])


def _number(instruction: Instruction | None) -> int | None:
    """The value of an integer constant; None for another instruction."""
    if instruction is None or instruction.opcode != "constant":
        return None
    text = instruction.rest.partition(")")[0]
    return int(text) if re.fullmatch(r"-?\d+", text) else None


def _step(body: Mapping[str, Instruction], name: str, index: int) -> int | None:
    """The number that instruction `name` of a loop's body adds to the counter; None if it does more than add constants.

    The counter is element `index` of the loop's tuple.
    """
    instruction = body.get(name)
    if instruction is None:
        return None
    if instruction.opcode == "get-tuple-element":
        return 0 if _index(instruction) == index else None
    given = operands(instruction)
    if instruction.opcode in ("copy", "bitcast"):
        return _step(body, given[0], index)
    if instruction.opcode != "add":
        return None
    for one, other in (given, given[::-1]):
        number, before = _number(body.get(other)), _step(body, one, index)
        if number is not None and before is not None:
            return before + number
    return None


def _start(body: Mapping[str, Instruction], loop: Instruction, index: int) -> int:
    """The counter's initial value in a loop of `body`; 0 if it is not found to be a constant."""
    given = body.get(operands(loop)[0])
    if given is None or given.opcode != "tuple":
        return 0
    first = body.get(operands(given)[index])
    while first is not None and first.opcode in ("copy", "bitcast"):
        first = body.get(operands(first)[0])
    return _number(first) or 0


def _collective(kind: str, instruction: Instruction, times: int, num_devices: int) -> Collective:
    group = _group(instruction.rest, num_devices)
    parts = tuple_parts(instruction.shape)
    if instruction.opcode.endswith("-start") and kind != "all-reduce":
        # The shape is (operands, results, ...), each a tuple if there are several arrays; take the results.
        parts = [parts[1]] if len(parts) > 1 else parts
    shape = re.sub(r"\{[^{}]*\}", "", ", ".join(parts))
    full = array_bytes(shape) * (group if kind == "reduce-scatter" else 1)
    scope = re.search(r'op_name="([^"]*)"', instruction.rest)
    return Collective(kind, shape, full, group, times, scope[1] if scope else "")


def _group(rest: str, num_devices: int) -> int:
    """The number of devices in each replica group; all devices if no groups are given."""
    listed = re.search(r"replica_groups=\{\{([0-9, ]*)\}", rest)
    if listed:
        return len(listed[1].split(","))
    iota = re.search(r"replica_groups=\[(\d+),(\d+)\]", rest)
    if iota:
        return int(iota[2])
    # Named mesh axes; the axes of the group are in braces.
    axes = re.search(r"replica_groups=mesh\[([^\]]*)\][^{]*?\{([^}]*)\}", rest)
    if axes:
        sizes = dict(re.findall(r"'([^']+)'=(\d+)", axes[1]))
        return math.prod(int(sizes[axis]) for axis in re.findall(r"'([^']+)'", axes[2]))
    return num_devices
