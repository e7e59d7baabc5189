"""Ways to damage a file, each driven by a seeded generator of random numbers."""

import functools
import io
import json
import math
import os
import pathlib
import random
import string
import zipfile
from collections.abc import Callable
from typing import Any

import hypothesis
from hypothesis import strategies

_NUMBERS = (
    *(
        "NaN",
        "-Infinity",
        "1e999",
        "-1e308",
        "1e-320",
        "-1",
        "0",
        "-0.0",
        "2147483648",
        "4294967296",
    ),
    *("9223372036854775808", "1" + "0" * 40, "9" * 5000, "true", "null", '"1"', "[]", "{}"),
)
_NOT_UTF8 = (b"\xff", b"\xc3\x28", b"\xed\xa0\x80", b"\xf5\x80\x80\x80", b"\x80", b"\xe2\x82")
# A pickle that runs a command, which makes a file, if it is loaded by Python's module pickle.
_PROGRAM = b"cos\nsystem\n(S'touch executed'\ntR."
# The most folders that a path of damaged input goes up.
MOST_UP = 4
# Numbers that hypothesis rarely draws from random bytes.
_SPECIAL = (math.nan, math.inf, -math.inf, 1e308, 5e-324, -0.0, 2**31, 2**32, 2**63, 10**40)
# Bytes from which a JSON value is drawn; most take a few hundred.
_VALUE_BYTES = 4096


@functools.cache
def _drawing() -> tuple[Callable[[bytes], bytes | None], list[Any]]:
    """A function that lets hypothesis draw a JSON value from bytes, and the list that the value is put into.

    The function returns None, and puts nothing into the list, if there are too few bytes.
    """
    numbers = (
        strategies.integers()
        | strategies.integers(-2, 2)
        | strategies.floats()
        | strategies.sampled_from(_SPECIAL)
    )
    # Any character, ASCII, and surrogates, which are not valid Unicode.
    characters = (
        strategies.characters(exclude_categories=()),
        strategies.characters(max_codepoint=127),
        strategies.characters(categories=["Cs"]),
    )
    text = strategies.one_of([strategies.text(some, max_size=20) for some in characters])
    names = strategies.integers(1, MOST_UP).map(lambda up: "../" * up + "outside/written")
    leaves = strategies.none() | strategies.booleans() | numbers | text | names
    nested = strategies.recursive(
        leaves,
        lambda inner: (
            strategies.lists(inner, max_size=4) | strategies.dictionaries(text, inner, max_size=4)
        ),
        max_leaves=8,
    )
    # Most values that `nested` draws are lists and dicts.
    values = strategies.booleans().flatmap(lambda is_nested: nested if is_nested else leaves)
    drawn: list[Any] = []

    @hypothesis.settings(database=None)
    @hypothesis.given(values)
    def collect(value: Any) -> None:
        drawn.append(value)

    test: Any = collect
    return test.hypothesis.fuzz_one_input, drawn


def json_value(chance: random.Random) -> Any:
    """Draws a value of JSON by hypothesis; some are not finite, not valid Unicode, huge, or a path that leaves the folder."""
    draw, drawn = _drawing()
    drawn.clear()
    while draw(chance.randbytes(_VALUE_BYTES)) is None:
        pass
    return drawn.pop()


def _nodes(value: Any) -> list[tuple[Any, Any]]:
    """Every place of nested JSON values, as a container and the key or index in it."""
    items = value.items() if isinstance(value, dict) else enumerate(value)
    found = []
    for key, inner in items:
        found.append((value, key))
        if isinstance(inner, dict | list):
            found += _nodes(inner)
    return found


def _changed_json(data: bytes, chance: random.Random, change: Callable[[Any, Any], None]) -> bytes:
    """Changes a random place of JSON, or of one line of JSON lines. Into other files, a value is inserted as text."""
    lines = [data]
    try:
        json.loads(data)
    except (ValueError, RecursionError):
        lines = data.split(b"\n")
    number = chance.randrange(len(lines))
    try:
        tree = json.loads(lines[number])
        places = _nodes(tree)
    except (ValueError, RecursionError, AttributeError, TypeError):
        places = []
    if places:
        change(*chance.choice(places))
        lines[number] = json.dumps(tree).encode()
    else:
        value = json.dumps(json_value(chance)).encode()
        at = chance.randrange(len(lines[number]) + 1)
        lines[number] = lines[number][:at] + value + lines[number][at:]
    return b"\n".join(lines)


def _value(data: bytes, chance: random.Random) -> bytes:
    def change(container: Any, key: Any) -> None:
        container[key] = json_value(chance)

    return _changed_json(data, chance, change)


def _key(data: bytes, chance: random.Random) -> bytes:
    def change(container: Any, key: Any) -> None:
        value = container.pop(key)
        if isinstance(container, dict) and chance.random() < 0.5:
            container[chance.choice([f"{key}s", "", "__class__", "\ud800", "x" * 3000])] = value

    return _changed_json(data, chance, change)


def _number(data: bytes, chance: random.Random) -> bytes:
    """Replaces a number by another one, often an impossible one. Data without digits get changed bytes."""
    starts = [i for i, byte in enumerate(data) if byte in b"0123456789"]
    if not starts:
        return _flip(data, chance)
    begin = end = chance.choice(starts)
    while end < len(data) and data[end] in b"0123456789.e":
        end += 1
    return data[:begin] + chance.choice(_NUMBERS).encode() + data[end:]


def _flip(data: bytes, chance: random.Random) -> bytes:
    """Changes one to four bytes, half of the time among the first 128, where headers are."""
    bad = bytearray(data or b"\0")
    longest = chance.choice([len(bad), min(len(bad), 128)])
    for _ in range(chance.randint(1, 4)):
        bad[chance.randrange(longest)] ^= chance.choice(
            [1 << chance.randrange(8), chance.randrange(1, 256)]
        )
    return bytes(bad)


def _cut(data: bytes, chance: random.Random) -> bytes:
    return data[: chance.randrange(len(data))] if data else b""


def _part(data: bytes, chance: random.Random) -> tuple[int, int]:
    begin = chance.randrange(len(data) + 1)
    return begin, min(len(data), begin + chance.choice([1, 8, 64, 1000]))


def _repeat(data: bytes, chance: random.Random) -> bytes:
    begin, end = _part(data, chance)
    return data[:end] + data[begin:end] * chance.choice([1, 2, 100]) + data[end:]


def _drop(data: bytes, chance: random.Random) -> bytes:
    begin, end = _part(data, chance)
    return data[:begin] + data[end:]


def _swap(data: bytes, chance: random.Random) -> bytes:
    a, b, c, d = sorted(chance.randrange(len(data) + 1) for _ in range(4))
    return data[:a] + data[c:d] + data[b:c] + data[a:b] + data[d:]


def _zeros(data: bytes, chance: random.Random) -> bytes:
    """Replaces a part by zeros, as if the disk had never written it."""
    begin, end = _part(data, chance)
    return data[:begin] + bytes(end - begin) + data[end:]


def _insert(data: bytes, chance: random.Random) -> bytes:
    at = chance.randrange(len(data) + 1)
    return data[:at] + chance.randbytes(chance.choice([1, 8, 500, 5000])) + data[at:]


def _utf8(data: bytes, chance: random.Random) -> bytes:
    at = chance.randrange(len(data) + 1)
    return data[:at] + chance.choice(_NOT_UTF8) + data[at:]


def _deep(data: bytes, chance: random.Random) -> bytes:
    """Nests lists or objects a hundred thousand levels deep, as the whole file or as one value in it."""
    one = chance.choice([b"[", b'{"a":'])
    deep = one * 100_000
    if chance.random() < 0.5:
        return deep
    closed = deep + b"0" + (b"]" if one == b"[" else b"}") * 100_000
    at = data.find(b":") + 1
    return data[:at] + closed + b"," + data[at:]


def _characters(data: bytes, chance: random.Random) -> bytes:
    """Overwrites one to six bytes by characters that have a meaning for a parser."""
    bad = bytearray(data or b"\0")
    for _ in range(chance.randint(1, 6)):
        bad[chance.randrange(len(bad))] = chance.choice(
            b"{}[]\"',:\\\n\r\t \0-+.eE" + string.digits.encode()
        )
    return bytes(bad)


def _archive(data: bytes, chance: random.Random) -> bytes:
    """Changes a zip archive: members with paths outside the folder or through a link, programs, huge members, or a name twice."""
    members: dict[str, bytes] = {}
    try:
        with zipfile.ZipFile(io.BytesIO(data)) as archive:
            members = {name: archive.read(name) for name in archive.namelist()}
    except (zipfile.BadZipFile, ValueError, NotImplementedError):
        return _insert(data, chance)
    kind = chance.choice(["outside", "absolute", "program", "bomb", "twice", "link"])
    stored = io.BytesIO()
    with zipfile.ZipFile(stored, "w") as archive:
        for name, content in members.items():
            if kind == "program" and chance.random() < 0.5:
                content = _PROGRAM
            is_bomb = kind == "bomb" and chance.random() < 0.5
            if is_bomb:
                content += bytes(2**26)
            archive.writestr(name, content, zipfile.ZIP_DEFLATED if is_bomb else zipfile.ZIP_STORED)
            if kind == "twice" and chance.random() < 0.5:
                with _no_warnings():
                    archive.writestr(name, content[::-1])
        # The campaign watches the working folder, too.
        if kind == "outside":
            archive.writestr("../" * chance.randint(1, MOST_UP) + "outside/written", b"x")
        if kind == "absolute":
            archive.writestr(f"{os.getcwd()}/written", b"x")
        if kind == "link":
            link = zipfile.ZipInfo("pytorch_model/link")
            link.external_attr = 0o120777 << 16
            archive.writestr(link, os.getcwd())
            archive.writestr("pytorch_model/link/written", b"x")
    return stored.getvalue()


def _no_warnings():
    import warnings

    return warnings.catch_warnings(action="ignore")


def _program(data: bytes, chance: random.Random) -> bytes:
    """Replaces the file, or its end, by a pickle that runs a command when it is loaded."""
    at = chance.choice([0, chance.randrange(len(data) + 1)])
    return _PROGRAM if not at else data[:at] + _PROGRAM


OF_BYTES: dict[str, Callable[[bytes, random.Random], bytes]] = {
    "flip": _flip,
    "cut": _cut,
    "repeat": _repeat,
    "drop": _drop,
    "swap": _swap,
    "zeros": _zeros,
    "insert": _insert,
    "utf8": _utf8,
    "characters": _characters,
    "number": _number,
    "value": _value,
    "key": _key,
    "deep": _deep,
    "archive": _archive,
    "program": _program,
}
# Kinds of damage that put something else in the place of a file.
OF_FILES = ("gone", "folder", "endless", "pipe", "loop", "sparse", "other", "unreadable")


def replace(
    path: pathlib.Path, kind: str, others: list[pathlib.Path], chance: random.Random
) -> None:
    """Puts something else in the place of a file.

    Args:
      path: the file.
      kind: one of `OF_FILES`.
      others: files whose content may stand in its place.
      chance: the generator of random numbers for the choice among them.
    """
    content = chance.choice(others).read_bytes()
    path.unlink()
    if kind == "folder":
        path.mkdir()
    elif kind == "endless":
        path.symlink_to("/dev/zero")
    elif kind == "pipe":
        os.mkfifo(path)
    elif kind == "loop":
        path.symlink_to(path.name)
    elif kind == "sparse":
        path.touch()
        os.truncate(path, 2**36)
    elif kind == "other":
        path.write_bytes(content)
    elif kind == "unreadable":
        path.symlink_to("/proc/self/mem")
