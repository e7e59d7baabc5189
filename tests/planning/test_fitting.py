"""The choice of microbatches and rematerialisation: the fastest that fits, with few compilations."""

import concurrent.futures
import dataclasses
import json
import math
import threading
import types

import jax
import pytest
from jax.sharding import AbstractMesh

from calm_jax.build import stage_of
from calm_jax.config import resolve
from calm_jax.cost import sizes
from calm_jax.data.tokenizers import ByteTokenizer, Vocabulary
from calm_jax.errors import UserError
from calm_jax.parallel import multihost
from calm_jax.parallel.devices import accelerator, memory_here
from calm_jax.parallel.mesh import AXES, MeshConfig, make_mesh
from calm_jax.planning import fitting
from calm_jax.planning.fitting import Need
from calm_jax.run.recipe import Run
from calm_jax.run.workdir import Workdir
from configs import ar_l, calm_m, calm_xl, quickstart
from tests.tiny_recipe import get_config

V5E = accelerator("TPU v5 lite")


def chosen(configs, stage="lm"):
    """(microbatches, rematerialisation) of configs."""
    return [tuple(fitting.chosen(one, stage).values()) for one in configs]


def calm(**keys):
    tree = calm_m.get_config()
    tree.lm.training.update(keys)
    return resolve(tree)


def test_candidates_recompute_only_when_microbatches_do_not_help():
    """On one data axis the gradients are exchanged once, however many microbatches there are."""
    mesh = AbstractMesh((32, 1, 1), AXES)
    every = chosen(fitting.candidates(calm(), "lm", mesh, 128257, V5E))
    assert every == [(n, way) for way in ("none", "full") for n in (1, 2, 4, 8)]


def test_candidates_recompute_before_the_exchange_takes_longer_than_computing():
    """With fsdp over the whole slice each microbatch gathers all parameters."""
    mesh = AbstractMesh((1, 256, 1), AXES)
    slow = dataclasses.replace(V5E, interconnect=V5E.interconnect / 1000)
    config = calm(batch_size=1024)
    assert chosen(fitting.candidates(config, "lm", mesh, 128257, V5E))[1] == (2, "none")
    assert chosen(fitting.candidates(config, "lm", mesh, 128257, slow))[:2] == [
        (1, "none"),
        (1, "full"),
    ]


def test_given_values_are_the_only_candidates():
    config = calm(accumulation_steps=4)
    mesh = AbstractMesh((1, 8, 1), AXES)
    assert chosen(fitting.candidates(config, "lm", mesh, 128257, None)) == [
        (4, "none"),
        (4, "full"),
    ]
    assert not fitting.is_automatic(fitting.with_choice(config, {"lm.model.remat": "dots"}), "lm")
    # The autoencoder has no layers to recompute.
    both = fitting.candidates(config, "autoencoder", mesh, 128257, None)
    assert {one.lm.model.remat for one in both} == {"auto"}


def measuring(measured, seconds):
    """Measures a step of 4 arguments, 2 constant and 64 / n more (a quarter of it with "full"), and records what was measured."""

    def measure(one):
        number, way = chosen([one])[0]
        measured.append((number, way))
        return Need(4, 2 + (16 if way == "full" else 64) / number, seconds(number, way))

    return measure


def test_the_first_candidate_that_fits_is_taken_without_compiling_hopeless_ones():
    every = fitting.candidates(calm(), "lm", AbstractMesh((1, 8, 1), AXES), 128257, None)
    measured = []
    measure = measuring(measured, lambda number, way: math.nan)
    found = fitting.fit_to_memory(every, "lm", 20, measure)
    # 66 / 2 and 66 / 4 exceed the 16 that are left; 66 / 8 does not.
    assert measured == [(1, "none"), (8, "none")]
    assert found.fits and chosen([found.config]) == [(8, "none")]
    assert found.need[:2] == (4, 10)
    measured.clear()
    found = fitting.fit_to_memory(every, "lm", 7, measure)
    assert found.fits and chosen([found.config]) == [(16, "full")]
    found = fitting.fit_to_memory(every, "lm", 6, measure)
    assert not found.fits and chosen([found.config]) == [(32, "full")]


@pytest.mark.parametrize("faster", ["none", "full"])
def test_of_the_first_that_fit_with_and_without_recomputing_the_faster_is_taken(faster):
    """As where the activations that are not kept move fewer bytes through a device's memory than it takes to compute them."""
    every = fitting.candidates(calm(), "lm", AbstractMesh((1, 8, 1), AXES), 128257, V5E)
    measured = []
    measure = measuring(measured, lambda number, way: (1 if way == faster else 2) + number / 100)
    found = fitting.fit_to_memory(every, "lm", 20, measure)
    assert sorted(measured) == [(1, "full"), (1, "none"), (2, "full"), (8, "none")]
    assert found.fits and chosen([found.config])[0][1] == faster


class Together:
    """As many threads as there are functions, one in place of each process; `multihost.all_gather` exchanges their values."""

    def __init__(self, monkeypatch, number):
        self._barrier, self._values = threading.Barrier(number, timeout=10), [None] * number
        self._place = threading.local()
        monkeypatch.setattr(multihost, "all_gather", self._all_gather)

    def _all_gather(self, value):
        self._values[self._place.index] = json.loads(json.dumps(value))
        self._barrier.wait()
        everyone = list(self._values)
        self._barrier.wait()
        return everyone

    def call(self, function):
        """The results of `function` for the index of each process."""

        def run(index):
            self._place.index = index
            return function(index)

        number = len(self._values)
        with concurrent.futures.ThreadPoolExecutor(number) as pool:
            return list(pool.map(run, range(number)))


@pytest.mark.parametrize("scales", [(1, 1.5), (1.5, 1), (1, 0.2), (0.2, 1)])
@pytest.mark.parametrize("timed", [True, False])
def test_processes_that_measure_differently_choose_the_same(scales, timed, monkeypatch):
    """As hosts whose compilers differ a little in what they need; both go by the larger need and the longer time."""
    rates = V5E if timed else None
    every = fitting.candidates(calm(), "lm", AbstractMesh((1, 8, 1), AXES), 128257, rates)
    tried, ways = [[], []], ("none", "full")

    def choose(index):
        def seconds(number, way):
            # Each process by itself would take another way.
            return (1 if way == ways[index] else 2 + index) + number / 100 if timed else math.nan

        one = measuring(tried[index], seconds)

        def measure(config):
            need = one(config)
            return need._replace(rest=need.rest * scales[index])

        return fitting.fit_to_memory(every, "lm", 20, measure)

    first, second = Together(monkeypatch, 2).call(choose)
    assert first.config == second.config and repr(first.need) == repr(second.need)
    assert tried[0] == tried[1] and first.fits and first.need.total <= 20


@pytest.mark.parametrize(
    "text, reason",
    [
        (None, "AssertionError"),
        ("ENTRY main {\n  ROOT a = f32[2] fusion(b)\n}", "ValueError: not enough values"),
        ("ENTRY main {\n  ROOT a = () while(b), condition=c, body=d\n}", "KeyError: 'c'"),
        ("ENTRY main {\n  ROOT a = f32[2] call(b), to_apply=main\n}", "RecursionError: "),
    ],
)
def test_without_a_readable_program_there_is_no_estimate(text, reason, capsys):
    """A run on new hardware, or with another compiler, must not end because its time cannot be foreseen."""
    config = calm(accumulation_steps=1)
    program = types.SimpleNamespace(as_text=lambda: text)
    mesh = AbstractMesh((1, 8, 1), AXES)
    assert math.isnan(fitting.least_seconds(program, config, "lm", mesh, 128257, V5E))
    (line,) = capsys.readouterr().out.splitlines()
    assert line.startswith(f"lm: the compiled program's text cannot be read ({reason}")


@pytest.fixture
def tiny():
    """Config, vocabulary, frozen parameters' shapes and mesh of the tiny recipe with automatic keys."""
    tree = get_config("*.txt")
    tree.lm.training.accumulation_steps, tree.lm.model.remat = 0, "auto"
    tree.lm.training.batch_size, tree.mesh.data = 16, 1
    config, words = resolve(tree), Vocabulary(259, 258)
    _, source, _ = stage_of(config, "lm", words)
    frozen = {"params": jax.eval_shape(source.init, jax.random.key(0))}
    return config, words, frozen, make_mesh(config.mesh, jax.devices()[:1])


@pytest.mark.slow
def test_a_step_is_fitted_into_the_memory_of_this_machine(tiny, monkeypatch, capsys):
    config, words, frozen, mesh = tiny
    key = jax.random.key(0)
    with jax.set_mesh(mesh):
        whole = fitting.fit_here(config, "lm", words, frozen, key, mesh)
        assert chosen([whole.config]) == [(1, "dots")]
        need = whole.need
        # Room for three quarters of that.
        monkeypatch.setattr(fitting, "memory_here", lambda: 1.5 * need.total)
        less = fitting.fit_here(config, "lm", words, frozen, key, mesh)
        assert less.need.total <= 0.75 * need.total
        assert chosen([less.config])[0][0] > 1
        assert "lm.training.accumulation_steps=" in capsys.readouterr().out
        # On another process.
        monkeypatch.setattr(fitting, "memory_here", lambda: 10 * need.total)
        with monkeypatch.context() as patch:
            smaller = [1.5 * need.total]
            others = lambda value: [value] + smaller * isinstance(value, float)  # noqa: E731
            patch.setattr(multihost, "all_gather", others)
            assert fitting.fit_here(config, "lm", words, frozen, key, mesh).config == less.config
        monkeypatch.setattr(fitting, "memory_here", lambda: 0.1 * need.arguments)
        with pytest.raises(UserError, match=r"lm: a training step does not fit .* mesh\.fsdp"):
            fitting.fit_here(config, "lm", words, frozen, key, mesh)


@pytest.mark.slow
def test_a_step_that_the_compiler_refuses_does_not_fit(tiny, monkeypatch):
    """As TPUs' compiler does: here for batches in one microbatch."""
    config, words, frozen, mesh = tiny
    real = jax.stages.Lowered.compile
    tried = []

    def compile_step(lowered, *arguments, **options):
        tried.append(lowered)
        if len(tried) == 1:
            raise jax.errors.JaxRuntimeError(
                "RESOURCE_EXHAUSTED: XLA:TPU compile permanent error. Ran out of memory in memory space hbm. "
                "Used 24.25G of 15.75G hbm. Exceeded hbm capacity by 8.50G."
            )
        return real(lowered, *arguments, **options)

    monkeypatch.setattr(jax.stages.Lowered, "compile", compile_step)
    with jax.set_mesh(mesh):
        found = fitting.fit_here(config, "lm", words, frozen, jax.random.key(0), mesh)
    assert len(tried) == 2 and chosen([found.config])[0] != (1, "dots")


@pytest.mark.parametrize("used", ["15.75", "15.80"])
def test_a_refused_program_needs_more_than_there_is(used):
    """Also where the compiler's message rounds both numbers to the same one."""

    def refuse(compiler_options):
        raise jax.errors.JaxRuntimeError(f"RESOURCE_EXHAUSTED: Used {used}G of 15.75G hbm.")

    lowered = types.SimpleNamespace(compile=refuse)
    for arguments in (0.0, 2.0**30, 2.0**34):
        program, memory, available = fitting.compile_program(lowered, arguments)
        assert program is None and available == 15.75 * 2**30
        assert arguments + sum(memory.values()) > available


def test_devices_hold_all_parameters_for_generation_if_both_copies_take_three_quarters_of_them():
    tree = calm_m.get_config()
    tree.mesh.update({"data": 1, "fsdp": 16})
    config = resolve(tree)
    # 371,732,608 trained ones, in float32 and bfloat16, and 75,832,064 frozen ones, twice in float32.
    copies = (4 + 2) * 371_732_608 + 2 * 4 * 75_832_064
    whole, split = MeshConfig(-1, 1, 1), MeshConfig(1, 16, 1)
    for memory, mesh in ((copies * 4 / 3, whole), (copies * 4 / 3 - 8, split)):
        assert fitting.generation_mesh(config, 128257, jax.devices() * 16, memory) == mesh
    # Four devices cannot make up fsdp=16.
    assert fitting.generation_mesh(config, 128257, jax.devices() * 4, 1) == MeshConfig(-1, 4, 1)


@pytest.mark.parametrize("recipe", [calm_m, calm_xl, ar_l, quickstart])
def test_what_a_backbone_needs_at_least_is_most_of_what_the_state_takes(recipe):
    config = resolve(recipe.get_config())
    vocab_size = 4096 if recipe is quickstart else 128_257
    state = sum(sizes.state_bytes(config, "lm", vocab_size).values())
    mesh = AbstractMesh((1, 2, 1), AXES)
    fitting.check_backbone(config, vocab_size, mesh, state / 2)
    with pytest.raises(UserError, match=r"lm: parameters, .* mesh\.fsdp \(now 2\)"):
        fitting.check_backbone(config, vocab_size, mesh, 0.4 * state / 2)


def test_the_memory_of_a_cpu_is_the_machines():
    assert 2**28 < memory_here() * jax.local_device_count() < 2**46


def test_a_choice_is_kept_for_the_same_devices_only(tmp_path):
    workdir = Workdir(tmp_path)
    here, elsewhere = {"kind": "cpu", "mesh": {"data": 1}}, {"kind": "TPU v4", "mesh": {"data": 1}}
    assert workdir.memory_choice("lm", here) is None
    for stage, number in (("lm", 2), ("autoencoder", 3)):
        workdir.store_memory_choice(stage, here, {"accumulation_steps": number, "remat": "full"})
    assert workdir.memory_choice("lm", here) == {"accumulation_steps": 2, "remat": "full"}
    assert workdir.memory_choice("autoencoder", here)["accumulation_steps"] == 3
    assert workdir.memory_choice("lm", elsewhere) is None
    for damaged in ("{", "[]", '{"lm": 3}', '{"lm": {"devices": {}}}'):
        (tmp_path / "memory.json").write_text(damaged)
        with pytest.raises(UserError, match=r"memory\.json cannot be read"):
            workdir.memory_choice("lm", here)


@pytest.fixture
def stored(tiny, tmp_path):
    """A function that chooses the keys of the tiny recipe in a workdir whose memory.json has these values for this machine."""
    config, _, _, mesh = tiny
    ByteTokenizer(b"").save(tmp_path / "tokenizer")
    workdir = Workdir(tmp_path)
    run = Run(config, workdir, mesh, None)
    kind = jax.devices()[0].device_kind
    devices = {"kind": kind, "mesh": dict(mesh.shape), **fitting.asked(config, "lm")}

    def choose(values):
        workdir.store_memory_choice("lm", devices, values)
        return run._fitted("lm", {})[0]

    yield choose
    run.log.close()


STEPS, REMAT = "lm.training.accumulation_steps", "lm.model.remat"


def test_a_stored_choice_is_taken(stored):
    assert chosen([stored({STEPS: 4, REMAT: "full"})]) == [(4, "full")]


@pytest.mark.parametrize(
    "values",
    [
        {f"ln.{STEPS[3:]}": 1, REMAT: "none"},
        {STEPS: "1", REMAT: "none"},
        # Of 16 rows.
        {STEPS: 3, REMAT: "none"},
        {STEPS: 0, REMAT: "none"},
        {STEPS: 1, REMAT: "auto"},
        {STEPS: 1},
        {STEPS: 1, REMAT: "none", "lm.training.num_steps": 1},
        [STEPS, REMAT],
        "none",
    ],
)
def test_a_stored_choice_that_is_not_possible_is_refused(values, stored, tmp_path):
    with pytest.raises(UserError) as error:
        stored(values)
    assert f"{tmp_path}/memory.json: {values!r} for lm is no possible choice: delete" in str(
        error.value
    )
