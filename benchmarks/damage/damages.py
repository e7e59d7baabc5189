"""Ways to damage a file, each driven by a seeded generator of random numbers."""

import functools
import io
import json
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


@functools.cache
def json_values() -> list[Any]:
    """200 values of JSON, drawn by hypothesis; a few are not finite, not valid Unicode, or huge."""
    numbers = strategies.integers() | strategies.integers(-2, 2) | strategies.floats()
    text = strategies.text(strategies.characters(exclude_categories=()), max_size=20)
    leaves = strategies.none() | strategies.booleans() | numbers | text
    values = strategies.recursive(
        leaves,
        lambda inner: (
            strategies.lists(inner, max_size=4) | strategies.dictionaries(text, inner, max_size=4)
        ),
        max_leaves=8,
    )
    found: list[Any] = []

    @hypothesis.seed(0)
    @hypothesis.settings(
        max_examples=200,
        database=None,
        deadline=None,
        phases=[hypothesis.Phase.generate],
        suppress_health_check=list(hypothesis.HealthCheck),
    )
    @hypothesis.given(values)
    def collect(value: Any) -> None:
        found.append(value)

    collect()
    return found


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
        value = json.dumps(chance.choice(json_values())).encode()
        at = chance.randrange(len(lines[number]) + 1)
        lines[number] = lines[number][:at] + value + lines[number][at:]
    return b"\n".join(lines)


def _value(data: bytes, chance: random.Random) -> bytes:
    def change(container: Any, key: Any) -> None:
        container[key] = chance.choice(json_values())

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
    """Changes a zip archive: members with paths outside the folder, links, programs, huge members, or the same name twice."""
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
        if kind in ("outside", "absolute"):
            above = "../" * chance.randint(1, 4) if kind == "outside" else "/"
            archive.writestr(f"{above}outside/written", b"x")
        if kind == "link":
            link = zipfile.ZipInfo("pytorch_model/link")
            link.external_attr = 0o120777 << 16
            archive.writestr(link, "../../outside")
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
