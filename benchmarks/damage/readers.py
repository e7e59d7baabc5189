"""The readers of the package that get damaged input: for each, functions that write intact files and read them."""

import collections
import contextlib
import dataclasses
import functools
import gzip
import hashlib
import importlib
import io
import json
import pathlib
import shutil
import socket
import sys
import threading
from collections.abc import Callable, Sequence
from typing import Any
from unittest import mock

import numpy as np
from absl import flags

from benchmarks import ROOT
from calm_jax.cli import flags as flags_lib
from calm_jax.cli.files import write_atomically
from calm_jax.config import as_json, resolve
from calm_jax.data import tokenizers
from calm_jax.data.documents import Reading, read_documents
from calm_jax.data.files import find_files
from calm_jax.data.prepare import preparation
from calm_jax.data.shards import PreparedText
from calm_jax.errors import UserError
from calm_jax.evaluation.samples import Scorer, read_references, read_samples
from calm_jax.interop import conversion
from calm_jax.interop.model_card import model_card
from calm_jax.interop.parity.comparison import verify
from calm_jax.interop.pretrained import is_published
from calm_jax.interop.weights import Weights
from calm_jax.run import preflight, web_comparison, web_report
from calm_jax.run.workdir import Workdir
from calm_jax.training.log import MetricsLog
from configs import ar_m, common
from tests.data import preparing
from tests.interop import weight_files
from tests.tiny_model import tiny

_GOLDEN = ROOT / "tests" / "golden"


class Refusal(Exception):
    """A refusal other than a `UserError`, with its one line."""


@dataclasses.dataclass(frozen=True)
class Reader:
    """A reader of the package.

    Attributes:
      write: writes intact files into a folder.
      read: reads them; the result is compared with that of the intact files.
      damaged: the glob of the files that are damaged.
      is_checked: whether checksums must find every change: it is refused, or the result is that of the intact files.
      without: kinds of damage that are left out: pipes for a flag that may name one, and huge files for text that is streamed.
      writes: whether it may write to the folder, which is then made anew for each case.
      share: the reader's share of the campaign's cases, relative to the other readers'.
    """

    write: Callable[[pathlib.Path], None]
    read: Callable[[pathlib.Path], Any]
    damaged: str = "**/*"
    is_checked: bool = False
    without: tuple[str, ...] = ()
    writes: bool = False
    share: float = 1.0


def _workdir(folder: pathlib.Path) -> None:
    """Writes a workdir with all its files but the checkpoints."""
    model = tiny()
    model.tokenizer.save(folder / "tokenizer")
    Workdir(folder).store_config(model.config)
    records = [
        {"stage": stage, "split": split, "step": step, "loss": 1 / step, "seconds": step / 2}
        for stage in ("autoencoder", "lm")
        for split in ("train", "validation")
        for step in (4, 8, 12)
    ]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(one) + "\n" for one in records))
    text = {"documents": 3, "characters": 300, "fingerprint": "0" * 16}
    _dump(folder / "corpus.json", {"train": text, "validation": text})
    _dump(folder / "memory.json", {"lm": {"devices": {"count": 1}, "chosen": {"remat": "none"}}})
    brier = {f"brier_{n}": 0.1 for n in range(1, 5)} | {
        f"brier_{n}_error": 0.01 for n in range(1, 5)
    }
    brier |= {"brierlm": 10.0, "brierlm_error": 0.5}
    accuracy = {
        f"{kind}_accuracy_from_{of}": 0.9
        for kind in ("token", "chunk")
        for of in ("sample", "mean")
    }
    results = {
        "autoencoder": {"step": 12, "training_seconds": 5.0, "loss": 0.1} | accuracy,
        "lm": {"step": 12, "training_seconds": 5.0, "loss": 0.1} | brier,
        "floor": brier,
    }
    _dump(folder / "results.json", results)
    (folder / "evaluations.jsonl").write_text(json.dumps({"seconds": 1.0} | results) + "\n")
    sample = {"prompt": "a", "tokens": list(b"abcdefgh"), "chunk_ends": [4, 8], "text": "abcdefgh"}
    (folder / "samples.jsonl").write_text(json.dumps(sample) + "\n")
    (folder / "samples.txt").write_text("seed 0\n\n--- prompt: 'a' ---\nabcdefgh\n")


def _dump(path: pathlib.Path, value: Any) -> None:
    path.write_text(json.dumps(value, indent=2) + "\n")


def _read_config(folder: pathlib.Path) -> Any:
    """Reads it as `calm_jax.load` does, which first tells a workdir from a published checkpoint."""
    return is_published(folder), as_json(Workdir(folder).config)


def _read_records(folder: pathlib.Path) -> Any:
    """Reads the files for both reports, resumed training, the check for a finished run, the choice for memory and the model card."""
    workdir = Workdir(folder)
    page = web_report.page(workdir), web_comparison.comparison({"a": [workdir], "b": [workdir] * 2})
    log = MetricsLog(folder)
    log.records = [one for one in log.records if one["stage"] != "lm" or one["step"] <= 8]
    _ = log.seconds("lm"), log.find("lm", "validation", 8)
    finished = preflight.is_finished(workdir.config, workdir)
    choice = workdir.memory_choice("lm", {"count": 1})
    card = model_card(workdir, True, 1000, "")
    return page, log.records, finished, choice, card


def _checkpoints(folder: pathlib.Path) -> None:
    import jax

    from calm_jax.parallel.mesh import MeshConfig, make_mesh
    from calm_jax.training.checkpoint import save_params

    model = tiny()
    with jax.set_mesh(make_mesh(MeshConfig(-1, 1, 1))):
        save_params(folder / "lm", model.params, {"step": 0})


def _read_checkpoint(folder: pathlib.Path) -> Any:
    import jax

    from calm_jax.parallel.mesh import MeshConfig, make_mesh
    from calm_jax.training.checkpoint import load_params

    mesh = make_mesh(MeshConfig(-1, 1, 1))
    with jax.set_mesh(mesh):
        params = load_params(folder / "lm", jax.eval_shape(lambda: tiny().params), mesh)
    return hashlib.sha256(
        b"".join(np.asarray(x).tobytes() for x in jax.tree.leaves(params))
    ).hexdigest()


# The steps of the two checkpoints of a training; the later one is damaged.
_STEPS = (4, 8)


def _training_state(step: int) -> Any:
    """A `TrainState` as training saves it, with the recipes' optimizer, but few and random numbers."""
    import jax

    from calm_jax.training.optimizer import make_optimizer
    from calm_jax.training.step import TrainState

    rng = np.random.default_rng(step)

    def random(leaf: Any) -> Any:
        return jax.numpy.asarray(rng.uniform(0, 9, leaf.shape), leaf.dtype)

    shape: Any = jax.ShapeDtypeStruct
    one, count = shape((), np.float32), shape((), np.int32)
    params = {
        "layers": {"kernel": shape((2, 8, 6), np.float32), "bias": shape((2, 6), np.float32)},
        "norm": {"scale": shape((6,), np.float32)},
    }
    optimizer = make_optimizer(tiny().config.lm.optimizer, 12)
    moments = jax.eval_shape(optimizer.init, params)
    shapes = TrainState(count, params, moments, {"loss": (one, one)}, count, count)
    return jax.tree.map(random, shapes)


def _training_checkpoints(folder: pathlib.Path) -> None:
    import jax

    from calm_jax.parallel.mesh import MeshConfig, make_mesh
    from calm_jax.training.checkpoint import Checkpointer

    checkpointer = Checkpointer(folder / "lm", len(_STEPS))
    with jax.set_mesh(make_mesh(MeshConfig(-1, 1, 1))):
        for step in _STEPS:
            rest = _training_state(step)._asdict()
            checkpointer.save(step, rest.pop("params"), rest, {"tokenizer": "bytes"})
    checkpointer.close()


def _read_training_checkpoint(folder: pathlib.Path) -> Any:
    """What a resumed training restores: the latest step, parameters, and optimizer state and all else."""
    import jax

    from calm_jax.parallel.mesh import MeshConfig, make_mesh
    from calm_jax.training.checkpoint import Checkpointer

    mesh = make_mesh(MeshConfig(-1, 1, 1))
    rest = jax.eval_shape(lambda: _training_state(_STEPS[-1]))._asdict()
    checkpointer = Checkpointer(folder / "lm", len(_STEPS))
    try:
        with jax.set_mesh(mesh):
            # No checksum covers the tokenizer's fingerprint; training compares it with the workdir's.
            if checkpointer.about().get("tokenizer") != "bytes":
                raise Refusal("it was saved with another tokenizer")
            restored = checkpointer.restore(rest.pop("params"), rest, mesh)
        return checkpointer.latest_step, [
            np.asarray(x).tobytes() for x in jax.tree.leaves(restored)
        ]
    finally:
        checkpointer.close()


_TEXTS = preparing.random_texts(7, 200)


@functools.cache
def _models() -> dict[str, bytes]:
    """Files of tokenizers: SentencePiece, Llama 3's ranks, and a tokenizer.json."""
    import base64

    import tokenizers as library

    pieces = tokenizers.make_tokenizer(
        tokenizers.TokenizerConfig("sentencepiece", "", 380, True), _TEXTS
    )
    tokens = [bytes([byte]) for byte in range(256)] + [b"ab", b"abc", b" a"]
    ranks = b"".join(base64.b64encode(token) + b" %d\n" % rank for rank, token in enumerate(tokens))
    bpe = library.Tokenizer(library.models.BPE())
    bpe.pre_tokenizer = library.pre_tokenizers.ByteLevel(add_prefix_space=False)
    bpe.decoder = library.decoders.ByteLevel()
    special = ["<|begin_of_text|>", "<|end_of_text|>", "[PAD]"]
    trainer = library.trainers.BpeTrainer(
        vocab_size=300,
        special_tokens=special,
        initial_alphabet=library.pre_tokenizers.ByteLevel.alphabet(),
    )
    bpe.train_from_iterator(_TEXTS, trainer)
    return {"pieces.model": pieces.model, "ranks.model": ranks, "bpe.json": bpe.to_str().encode()}


def _tokenizer_files(folder: pathlib.Path) -> None:
    for name, model in _models().items():
        (folder / name).write_bytes(model)


def _used(tokenizer: tokenizers.Tokenizer) -> Any:
    ids = tokenizer.encode("def f(x): abc é 日本\n")
    return tokenizer.description, ids, tokenizer.decode(ids)


def _read_tokenizer_files(folder: pathlib.Path) -> Any:
    return [_used(tokenizers.open_tokenizer(str(folder / name))[0]) for name in _models()]


def _saved_tokenizers(folder: pathlib.Path) -> None:
    for name, model in _models().items():
        kind = "sentencepiece" if name.startswith("pieces") else "llama3"
        tokenizers.KINDS[kind](model).save(folder / name)


def _read_saved_tokenizers(folder: pathlib.Path) -> Any:
    return [_used(tokenizers.load_tokenizer(folder / name)) for name in _models()]


def _arrays() -> dict[str, np.ndarray]:
    rng = np.random.default_rng(1)
    shapes = {"encoder.weight": (3, 4), "encoder.bias": (5,), "norm": (6,)}
    return {name: rng.normal(size=shape).astype(np.float32) for name, shape in shapes.items()}


def _weights(*forms: str) -> Callable[[pathlib.Path], None]:
    def write(folder: pathlib.Path) -> None:
        for form in forms:
            weight_files.write_folder(folder / form.replace(" ", "_"), form, _arrays())

    return write


def _read_weights(folder: pathlib.Path) -> Any:
    found = []
    for one in sorted(folder.iterdir()):
        weights = Weights(one)
        found.append({name: weights.read(name).tobytes() for name in sorted(weights.tensors)})
    return found


def _published(folder: pathlib.Path) -> None:
    for name in ("energy_k2", "ar"):
        shutil.copytree(_GOLDEN / name, folder / name)


def _read_published(folder: pathlib.Path) -> Any:
    """Converts checkpoints, up to the writing of workdirs."""
    found = []
    for name in ("energy_k2", "ar"):
        tokenizer, config = tokenizers.open_tokenizer("bytes")
        recipes = {True: common.get_config(), False: ar_m.get_config()}
        # The golden models have a vocabulary of their own.
        with contextlib.suppress(UserError):
            conversion.check_tokenizer(conversion.PublishedConfig(folder / name), tokenizer)
        tokenizer.vocab_size = json.loads((_GOLDEN / name / "config.json").read_text())[
            "vocab_size"
        ]
        tokenizer.bos_id, tokenizer.eos_id, tokenizer.pad_id = _special(name)
        plan = conversion.make_plan(folder / name, None, tokenizer, config, recipes, {})
        conversion.check_copies(plan)
        arrays = [
            part.weights.read(n).tobytes()
            for part in plan.parts
            for n in sorted(part.weights.tensors)
        ]
        found.append((as_json(plan.config), hashlib.sha256(b"".join(arrays)).hexdigest()))
    return found


@functools.cache
def _special(name: str) -> tuple[int, ...]:
    values = json.loads((_GOLDEN / name / "config.json").read_text())
    found = [values.get(f"{kind}_token_id") for kind in ("bos", "eos", "pad")]
    return tuple(number if isinstance(number, int) else place for place, number in enumerate(found))


def _shards(folder: pathlib.Path) -> None:
    tokenizer = tokenizers.KINDS["sentencepiece"](_models()["pieces.model"])
    inputs = folder.with_name("prepared input")
    files = preparing.write_mixed(inputs, preparing.random_texts(17, 45))
    preparing.prepared(folder / "text", files, tokenizer, shard_characters=1700)
    shutil.rmtree(inputs)


def _read_shards(folder: pathlib.Path) -> Any:
    text = PreparedText(folder / "text")
    tokens = preparing.everything(text)
    _ = text.tokenizer
    for number in range(text.num_shards):
        text.bounds(number)
        text.check(number)
    return tokens


def _read_inspected(folder: pathlib.Path) -> str:
    """What `calm_jax.data.inspect` prints about prepared text."""
    inspect, shown = _command("calm_jax.data.inspect"), io.StringIO()
    flags.FLAGS.unparse_flags()
    flags.FLAGS(["inspect", "--checksums"])
    with contextlib.redirect_stdout(shown):
        inspect.main.__wrapped__(["inspect", f"{folder}/text"])
    return shown.getvalue()


class _Stopped(Exception):
    """A preparation was stopped after some of its tasks."""


class _Here(contextlib.AbstractContextManager):
    """In place of a preparation's cluster: runs the tasks in this process, and stops it after some of them."""

    num_workers = 1
    report = staticmethod(preparing.no_report)

    def __init__(self, most: int, *_):
        self._left = most

    def __exit__(self, *_):
        pass

    def run(self, function: Callable, arguments: Sequence, title: str = "", total: int = 0) -> None:
        for one in arguments:
            try:
                function(one)
            except OSError as error:
                raise UserError(f"a task could not read or write: {error}") from error
            self._left -= 1
            if not self._left:
                raise _Stopped


def _prepare(output: pathlib.Path, most_tasks: int) -> Any:
    """Prepares two files of text, or goes on with it. Returns the index and the tokens."""
    # inputs.json has the absolute paths of the files, which must be the same for the intact folder and its copy.
    inputs = ROOT / ".cache" / "damage"
    files = [inputs / "a.jsonl", inputs / "b.jsonl"]
    for number, file in enumerate(files):
        if not file.exists():
            inputs.mkdir(parents=True, exist_ok=True)
            write_atomically(file, preparing.json_lines(_TEXTS[number : 100 * number + 40]))
    options = preparing.options(deduplicate=True, shard_characters=2000)
    cluster = functools.partial(_Here, most_tasks)
    with mock.patch.object(preparation, "Cluster", cluster):
        names = [str(file) for file in files]
        index = preparation.prepare(names, preparing.BYTES, output, options, workers=1)
    return index, preparing.everything(PreparedText(output))


def _begun(folder: pathlib.Path) -> None:
    """Two preparations: one stopped before the layout of shards was decided, the other after the first shard."""
    for name, tasks in (("scanned", 2), ("laid_out", 3)):
        with contextlib.suppress(_Stopped):
            _prepare(folder / name, tasks)


def _read_begun(folder: pathlib.Path) -> Any:
    return [_prepare(folder / name, -1) for name in ("scanned", "laid_out")]


def _texts(folder: pathlib.Path) -> None:
    preparing.write_mixed(folder / "in", preparing.random_texts(3, 40))
    (folder / "in" / "f.json.gz").write_bytes(gzip.compress(preparing.json_lines(_TEXTS[:5])))


def _read_texts(folder: pathlib.Path) -> Any:
    """Reads all files, skipping bad records; then again, with an error for the first bad record."""
    left: collections.Counter = collections.Counter()
    files = find_files(f"{folder}/in/*", "data.train_files")
    found = [
        one.text
        for one in read_documents(
            files, "data.train_files", Reading("text", on_bad_record="skip"), left
        )
    ]
    for _ in read_documents(files, "data.train_files", Reading("text"), left):
        pass
    return found


def _prompts(folder: pathlib.Path) -> None:
    (folder / "a.txt").write_text("def f(x):\n\nclass é 日本\n")
    lines = [{"prompt": "def f"}, {"prompt": [1, 2, 3]}, {"prompt": ""}]
    (folder / "b.jsonl").write_text("".join(json.dumps(one) + "\n" for one in lines))


def _read_prompts(folder: pathlib.Path) -> Any:
    generate, generator, found = _command("calm_jax.generate"), _generator(), []
    for name in ("a.txt", "b.jsonl"):
        flags.FLAGS.unparse_flags()
        flags.FLAGS(["generate", f"--prompts_file={folder / name}"])
        rows = generator.rows(generate._prompts(), generator.options, 0)
        found += [row.ids for row in rows]
    return found


def _samples(folder: pathlib.Path) -> None:
    references = [
        {"id": f"{n}", "block": n // 2, "text": "abcdef", "tokens": [1, 2, 3, 4], "context": "x"}
        for n in range(6)
    ]
    samples = [{"id": f"{n}", "samples": [[1, 2, 3, 4], [1, 2], [5]]} for n in range(6)]
    for name, lines in (("references", references), ("samples", samples)):
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(one) + "\n" for one in lines))


def _read_samples(folder: pathlib.Path) -> Any:
    references = read_references(str(folder / "references.jsonl"))
    samples = read_samples(str(folder / "samples.jsonl"), references)
    scorer = Scorer(references, tokenizers.KINDS["bytes"](b""))
    return float(scorer.score(samples).brierlm)


@functools.cache
def _generator():
    return tiny().generator()


_REQUEST = {
    "model": "tiny",
    "prompt": ["def f", "a"],
    "max_tokens": 4,
    "temperature": 0.5,
    "stop": ["x", "yy"],
    "seed": 3,
    "n": 2,
    "sampler": "batch",
    "num_candidates": 5,
    "stream": False,
    "stream_options": {"include_usage": True},
}


def _requests(folder: pathlib.Path) -> None:
    (folder / "body.json").write_text(json.dumps(_REQUEST))
    (folder / "ids.json").write_text(
        json.dumps({"prompt": [[1, 2, 3], [4]], "max_tokens": 3, "seed": 1})
    )


def _limits():
    from calm_jax.serve.request import Limits

    return Limits(100, 64, 8, 64, 500, 10_000, 60)


def _read_requests(folder: pathlib.Path) -> Any:
    from calm_jax.serve.request import RequestError, load, parse, refused

    found = []
    for name in ("body.json", "ids.json"):
        try:
            asked = parse(load((folder / name).read_bytes()), _generator(), _limits())
            try:
                rows = _generator().rows(asked.prompts, asked.options, asked.seed)
            except UserError as error:
                raise refused(error) from error
        except RequestError as error:
            # The body of the answer has to be JSON that a client can read.
            json.dumps({"message": error.message, "param": error.param}).encode()
            raise Refusal(error.message) from error
        seed = asked.seed if b'"seed"' in (folder / name).read_bytes() else None
        found.append(([row.ids for row in rows], asked.options, seed, asked.stream))
    return found


def _connections(folder: pathlib.Path) -> None:
    body = json.dumps({"prompt": "a", "max_tokens": 4, "temperature": 1.0, "seed": 1}).encode()
    head = "POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
    head += f"Content-Length: {len(body)}\r\nConnection: close\r\n\r\n"
    (folder / "request.http").write_bytes(head.encode() + body)


@functools.cache
def _port() -> int:
    import uvicorn

    from calm_jax.serve import app

    models = {"tiny": app.Served(_generator(), 4, _limits())}
    served = app.make_app(models, app.LOOPBACK_NAMES)
    listener = socket.create_server(("127.0.0.1", 0))
    # An incomplete request is refused, and an idle connection closed, after a second. Users' servers wait for 30 and 5.
    app._BODY_SECONDS = 1.0
    config = uvicorn.Config(
        served, http="h11", ws="none", lifespan="on", log_level="critical", timeout_keep_alive=1
    )
    threading.Thread(target=uvicorn.Server(config).run, args=([listener],), daemon=True).start()
    return listener.getsockname()[1]


def _ask(data: bytes) -> bytes:
    """The server's response to some bytes. A client whose request may be incomplete hangs up after half a second."""
    with socket.create_connection(("127.0.0.1", _port())) as connection:
        connection.settimeout(50 if data.endswith((b"}", b"\r\n\r\n")) else 0.5)
        answer = b""
        with contextlib.suppress(ConnectionError, TimeoutError):
            connection.sendall(data)
            while part := connection.recv(2**16):
                answer += part
        return answer


def _read_connections(folder: pathlib.Path) -> Any:
    answer = _ask((folder / "request.http").read_bytes())
    health = _ask(b"GET /health HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n")
    if not health.startswith(b"HTTP/1.1 200"):
        raise AssertionError(f"the server is not well: {health[:100]!r}")
    status, head, body = answer[9:12], *answer.partition(b"\r\n\r\n")[::2]
    if status[:1] == b"4" or not answer:
        raise Refusal(f"status {status.decode()}")
    if status != b"200":
        raise AssertionError(f"status {status!r}: {body[:100]!r}")
    if b"application/json" not in head:
        return "another page"
    return [one.get("text") for one in json.loads(body).get("choices", [])]


def _command(name: str) -> Any:
    """Imports the module of a command. Its flags replace those that other commands have defined in this process."""
    if name not in sys.modules:
        for module, some in flags.FLAGS.flags_by_module_dict().items():
            for flag in some if not module.startswith("absl") else ():
                delattr(flags.FLAGS, flag.name)
    return importlib.import_module(name)


def _arguments(*lines: str) -> Callable[[pathlib.Path], None]:
    """A function that writes a command line to a file, one argument a line."""

    def write(folder: pathlib.Path) -> None:
        (folder / "arguments.txt").write_text("\n".join(lines))

    return write


def _parsed(folder: pathlib.Path, parse: Callable[[list[str]], list[str]]) -> list[str]:
    """Parses the command line of a folder. Raises `Refusal` with the line of error."""
    text = (folder / "arguments.txt").read_bytes().decode("utf-8", "surrogateescape")
    # The operating system passes no arguments with zero bytes.
    argv = ["command", *text.replace("\0", "").split("\n")]
    values, shown = flags.FLAGS, io.StringIO()
    values.unparse_flags()
    for key in [key for key in values if key.startswith("config.")]:
        delattr(values, key)
    # ml_collections reads the overridden keys from sys.argv.
    sys.argv = argv
    try:
        with contextlib.redirect_stderr(shown), contextlib.redirect_stdout(shown):
            return parse(argv)
    except SystemExit as stop:
        line = shown.getvalue().removesuffix("\n")
        if stop.code != 2 or not line.startswith("error: "):
            raise AssertionError(f"status {stop.code}: {line}") from stop
        raise Refusal(line) from stop


def _read_training_flags(folder: pathlib.Path) -> Any:
    _command("calm_jax.main")
    rest = _parsed(folder, flags_lib.parse_flags)
    recipe = flags.FLAGS["config"].value
    return len(rest), as_json(resolve(recipe)) if recipe is not None else ""


def _read_sampling_flags(folder: pathlib.Path) -> Any:
    generate = _command("calm_jax.generate")
    rest = _parsed(folder, flags_lib.parse_flags)
    return len(rest), str(generate._options(tiny().config))


def _golden(folder: pathlib.Path) -> None:
    for name in ("temperature.npz", "ae_k2.npz"):
        shutil.copy(_GOLDEN / name, folder / name)
    shutil.copytree(_GOLDEN / "ae_k2", folder / "ae_k2")


def _read_golden(folder: pathlib.Path) -> Any:
    rows, unknown = verify(folder)
    failed = [row for row in rows if not row.passed]
    if failed:
        for row in failed:
            if "\n" in row.quantity:
                raise AssertionError(f"more than one line: {row.quantity!r}")
        raise Refusal(failed[0].quantity)
    return [(row.case, row.quantity) for row in rows], unknown


READERS: dict[str, Reader] = {
    "config": Reader(_workdir, _read_config, "config.json"),
    "records": Reader(_workdir, _read_records, "*.*"),
    "checkpoints": Reader(_checkpoints, _read_checkpoint, is_checked=True, share=0.5),
    "training checkpoints": Reader(
        _training_checkpoints,
        _read_training_checkpoint,
        f"lm/{_STEPS[-1]}/**/*",
        is_checked=True,
        share=0.5,
    ),
    "saved tokenizers": Reader(_saved_tokenizers, _read_saved_tokenizers, is_checked=True),
    "tokenizer files": Reader(_tokenizer_files, _read_tokenizer_files),
    "safetensors": Reader(_weights("safetensors", "sharded safetensors"), _read_weights),
    "pickles": Reader(_weights("bin", "sharded bin"), _read_weights),
    "published": Reader(_published, _read_published, share=0.5),
    "prepared text": Reader(_shards, _read_shards, is_checked=True),
    "inspected text": Reader(_shards, _read_inspected, "text/index.json"),
    "begun preparations": Reader(_begun, _read_begun, is_checked=True, writes=True, share=0.5),
    "text": Reader(_texts, _read_texts, without=("sparse",)),
    "prompts": Reader(_prompts, _read_prompts, without=("pipe",)),
    "samples": Reader(_samples, _read_samples, without=("pipe",)),
    "training flags": Reader(
        _arguments(
            f"--config={ROOT}/tests/tiny_recipe.py:*.none",
            *("--config.seed=3", "--config.lm.head.beta=1.5", "--config.lm.model.num_layers=2"),
            *("--config.sample.temperature=0.5", "--config.data.train_files=x"),
            *("--config.chunk_size=4", "--config.sample.prompts=('a','b')"),
        ),
        _read_training_flags,
    ),
    "sampling flags": Reader(
        _arguments(
            *("--prompt=a", "--seed=3", "--temperature=0.5", "--max_tokens=4", "--stop=x"),
            *("--batch_size=2", "--nooverwrite", "--sampler=batch", "--num_candidates=5"),
        ),
        _read_sampling_flags,
    ),
    "requests": Reader(_requests, _read_requests, "*.json"),
    "connections": Reader(_connections, _read_connections, "*.http", share=0.5),
    "golden": Reader(_golden, _read_golden, share=0.2),
}
# Readers whose input does not come from files: it is never replaced by a folder or a device.
NO_FILES = ("training flags", "sampling flags", "requests", "connections")
