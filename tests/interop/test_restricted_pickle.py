"""The pickle interpreter: hostile pickles are refused in one line and run nothing; tensors must fit their storage."""

import os
import pickle
import time

import numpy as np
import pytest

from calm_jax.errors import UserError
from calm_jax.interop import restricted_pickle
from tests.interop.checkpoints import as_float32, assert_same, read_all, refusal_to_read
from tests.interop.weight_files import (
    BIN,
    Tensor,
    assert_little_memory,
    pickled,
    storage,
    tensor,
    write_archive,
    write_bin,
)

# --- Hostile pickles


class Marked:
    """An object whose pickle calls a function."""

    def __init__(self, function, *arguments):
        self.function, self.arguments = function, arguments

    def __reduce__(self):
        return self.function, self.arguments


def dumps(function, *arguments, protocol=2):
    return pickle.dumps({"x": Marked(function, *arguments)}, protocol)


# A nested tuple: () in the memo, then t = (t, t) `times` times. Its repr or hash takes 2**times steps.
def nested(times):
    return b"()q\x00" + b"h\x00h\x00\x86q\x00" * times + b"t"


# The pickle of {"x": value}, from the instructions that make the value.
def item(program):
    return b"\x80\x02}X\x01\x00\x00\x00x" + program + b"s."


# The instruction SHORT_BINUNICODE.
def short(text):
    return b"\x8c" + bytes([len(text)]) + text.encode()


REBUILT = b"ctorch._utils\n_rebuild_tensor_v2\n"


# Name of the case: a function from a file that must not appear to the pickle, and words of the refusal.
HOSTILE = {
    "os.system": (lambda mark: dumps(os.system, f"touch {mark}"), "system"),
    "os.system, protocol 4": (
        lambda mark: dumps(os.system, f"touch {mark}", protocol=4),
        "posix.system",
    ),
    "builtins.eval": (
        lambda mark: dumps(eval, f"open({str(mark)!r}, 'w')", protocol=4),
        "builtins.eval",
    ),
    "builtins.eval, protocol 2": (
        lambda mark: dumps(eval, f"open({str(mark)!r}, 'w')"),
        "__builtin__.eval",
    ),
    "pathlib.Path": (lambda mark: b"\x80\x02cpathlib\nPath\n.", "pathlib.Path"),
    "something innocent": (lambda mark: b"\x80\x02ccollections\nCounter\n.", "collections.Counter"),
    "of torch": (lambda mark: b"\x80\x02ctorch\nload\n.", "torch.load"),
    "a dotted name": (
        lambda mark: b"\x80\x04" + short("torch") + short("os.system") + b"\x93.",
        "torch.os.system",
    ),
    "a known name cut elsewhere": (
        lambda mark: b"\x80\x04" + short("torch._utils _rebuild_tensor_v2") + short("") + b"\x93.",
        "_rebuild_tensor_v2",
    ),
    "INST": (lambda mark: b"(X\x01\x00\x00\x00xios\nsystem\n.", "INST"),
    "OBJ": (lambda mark: b"\x80\x02(ctorch._utils\n_rebuild_tensor_v2\no.", "OBJ"),
    "NEWOBJ": (lambda mark: b"\x80\x02ccollections\nOrderedDict\n)\x81.", "NEWOBJ"),
    "EXT1": (lambda mark: b"\x80\x02\x82\x01.", "EXT1"),
    "PERSID": (lambda mark: b"\x80\x02Pstorage\n.", "PERSID"),
    "a list": (lambda mark: b"\x80\x02].", "EMPTY_LIST"),
    "BUILD on a function": (lambda mark: item(REBUILT + b"}b"), "no dict"),
    "BUILD on a class": (lambda mark: item(b"ccollections\nOrderedDict\n}b"), "no dict"),
    "an argument for OrderedDict": (
        lambda mark: item(b"ccollections\nOrderedDict\n}\x85R"),
        "collections.OrderedDict",
    ),
    "a call of a string": (lambda mark: item(b"X\x01\x00\x00\x00x)R"), "no function"),
    "a call with no tuple": (lambda mark: item(REBUILT + b"}R"), "no function"),
    "a call of a storage": (lambda mark: item(b"ctorch\nFloatStorage\n)R"), "torch.FloatStorage"),
    "a tensor of nothing": (lambda mark: item(REBUILT + b")R"), "storage"),
    "a parameter of nothing": (
        lambda mark: item(b"ctorch._utils\n_rebuild_parameter\n)R"),
        "_rebuild_parameter",
    ),
    "a nested tuple as a key": (lambda mark: b"\x80\x02}" + nested(60) + b"Ns.", "key"),
    "a nested tuple as a value": (lambda mark: item(nested(60)), "dict of tensors"),
    "a nested tuple alone": (lambda mark: b"\x80\x02" + nested(60) + b".", "dict of tensors"),
    "a nested tuple as a storage": (lambda mark: item(nested(60) + b"Q"), "storage"),
    "a nested tuple as a shape": (
        lambda mark: item(REBUILT + b"(" + nested(60) + b"h\x00h\x00h\x00tR"),
        "storage",
    ),
    # Only 2**20 elements, so that a failure of this test would not exhaust the machine.
    "a nested tuple as a module": (
        lambda mark: b"\x80\x04" + nested(20) + short("x") + b"\x93.",
        "",
    ),
    "a nested tuple as a name": (
        lambda mark: b"\x80\x04" + short("os") + nested(20) + b"\x93.",
        "",
    ),
    "a number as a module": (lambda mark: b"\x80\x04K\x01" + short("x") + b"\x93.", ""),
    "a line break in a name": (
        lambda mark: b"\x80\x04" + short("os") + short("a\nb") + b"\x93.",
        "",
    ),
    "a mark as the result": (lambda mark: b"\x80\x02(.", "dict of tensors"),
    "a mark in a tuple": (lambda mark: item(b"(\x85"), "dict of tensors"),
    "nothing": (lambda mark: b"", ""),
    "no end": (lambda mark: b"\x80\x02}", ""),
    "an empty stack": (lambda mark: b"\x80\x02.", ""),
    "a memo that is not there": (lambda mark: b"\x80\x02h\x07.", ""),
    "items without a mark": (lambda mark: b"\x80\x02}u.", ""),
    "no tensors": (lambda mark: b"\x80\x02}X\x01\x00\x00\x00xK\x01s.", "dict of tensors"),
    "a training checkpoint": (
        lambda mark: b"\x80\x02}X\x0a\x00\x00\x00state_dict}s.",
        "state_dict alone",
    ),
}


@pytest.mark.parametrize("case", HOSTILE)
def test_a_hostile_pickle_is_refused_and_runs_nothing(case, tmp_path):
    program, words = HOSTILE[case]
    mark = tmp_path / "mark"
    write_archive(tmp_path / BIN, program(mark), [])
    began = time.monotonic()
    line = refusal_to_read(tmp_path)
    assert time.monotonic() - began < 1
    assert BIN in line and words in line
    assert not mark.exists()


def test_unpickling_the_hostile_pickles_runs_their_code(tmp_path):
    for case in ("os.system", "builtins.eval"):
        mark = tmp_path / case
        pickle.loads(HOSTILE[case][0](mark))
        assert mark.exists()


def test_the_depth_of_the_stack_is_limited(tmp_path, monkeypatch):
    monkeypatch.setattr(restricted_pickle, "_MOST_STACKED", 1000)
    with pytest.raises(restricted_pickle.Refused, match="stacks more"):
        restricted_pickle._Machine().run(b"\x80\x02" + b"}" * 2000 + b".")


def test_a_long_global_name_is_cut_in_the_message():
    program = b"\x80\x02c" + b"a" * 10**6 + b"\nb\n."
    with pytest.raises(restricted_pickle.Refused) as refused:
        restricted_pickle._Machine().run(program)
    assert len(str(refused.value)) < 300


# --- Tensors that do not fit their storage


def damaged_tensors():
    """Tensors that do not fit their storage, each with its name."""
    good = storage(np.ones(6, np.float32))
    huge = 2**62
    yield "beyond its storage", Tensor(good, 0, (7,), (1,))
    yield "an offset beyond its storage", Tensor(good, 5, (2,), (1,))
    yield "a stride beyond its storage", Tensor(good, 0, (2, 3), (4, 1))
    yield "an absurd shape", Tensor(good, 0, (huge, huge), (1, 1))
    yield "an absurd shape of one number", Tensor(good, 0, (huge,), (0,))
    yield "numbers repeated", Tensor(good, 0, (1000, 1000, 1000), (0, 0, 0))
    yield "numbers repeated a little", Tensor(good, 0, (7, 1), (0, 1))
    yield "a negative stride", Tensor(good, 5, (6,), (-1,))
    yield "a negative offset", Tensor(good, -1, (2,), (1,))
    yield "a negative shape", Tensor(good, 0, (-2, -3), (1, 1))
    yield "a shape that is no tuple", Tensor(good, 0, "6", (1,))
    yield "a shape of strings", Tensor(good, 0, ("6",), (1,))
    yield "a shape of booleans", Tensor(good, 0, (True,), (1,))
    yield "more strides than axes", Tensor(good, 0, (6,), (1, 1))
    yield "too many axes", Tensor(good, 0, (1,) * 100, (1,) * 100)
    yield "a storage that is larger", Tensor(storage(np.ones(6, np.float32), 7), 0, (7,), (1,))
    yield "a storage that is smaller", Tensor(storage(np.ones(6, np.float32), 5), 0, (5,), (1,))
    yield (
        "a storage of gigabytes",
        Tensor(storage(np.ones(6, np.float32), huge), 0, (2,), (huge // 2,)),
    )
    yield "a storage of negative size", Tensor(storage(np.ones(6, np.float32), -6), 0, (6,), (1,))
    # No numbers to read, or an address beyond 64 bits.
    yield "an absurd shape of nothing", Tensor(good, 0, (0, huge, huge), (1, 1, 1))
    yield "an absurd stride", Tensor(good, 0, (1,), (10**30,))
    yield "an absurd stride in bytes", Tensor(good, 0, (1,), (huge,))
    yield "an absurd stride of nothing", Tensor(good, 0, (0, 3), (10**30, 1))


@pytest.mark.parametrize(
    ("case", "bad"), list(damaged_tensors()), ids=lambda x: x if isinstance(x, str) else ""
)
def test_a_tensor_that_does_not_fit_its_storage_is_refused(case, bad, tmp_path):
    write_bin(tmp_path / BIN, {"x": bad})

    def read():
        try:
            read_all(tmp_path)
        except UserError as error:
            assert BIN in str(error) and "\n" not in str(error)
        else:
            # The stride of an axis of length 0 or 1 has no effect.
            assert "absurd stride" in case

    assert_little_memory(2**22, read)


def test_a_negated_or_conjugated_view_is_refused(tmp_path):
    """PyTorch saves `x.conj().imag` as the stored numbers and metadata that says that they are negated."""
    values = storage(np.ones(3, np.float32))
    write_bin(tmp_path / BIN, {"x": Tensor(values, 0, (3,), (1,), more=({"neg": True},))})
    refusal_to_read(tmp_path)


def test_one_member_can_be_read_as_storages_of_two_dtypes(tmp_path):
    """Two persistent ids name the same member; each sets the dtype of its own tensor."""
    values = np.arange(6, dtype=np.float32)
    program, storages = pickled({"x": tensor(values), "y": tensor(values.view(np.float16))})
    # The second storage gets the key of the first; both have the same size in bytes.
    key = b"X\x01\x00\x00\x00"
    write_archive(tmp_path / BIN, program.replace(key + b"1", key + b"0"), storages[:1])
    found = read_all(tmp_path)
    assert_same(found, as_float32({"x": values, "y": values.view(np.float16)}))
