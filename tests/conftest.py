"""Shared set-up: JAX on the CPU, its persistent compilation cache, and fixtures of several test folders."""

import importlib.metadata
import json
import os
import pathlib
import shutil
from collections.abc import Callable

# Must be set before jax is first imported.
os.environ.setdefault("JAX_PLATFORMS", "cpu")
CACHE = pathlib.Path(__file__).parent.parent / ".cache" / "jax"
os.environ.setdefault("JAX_COMPILATION_CACHE_DIR", str(CACHE))
os.environ.setdefault("JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS", "0")
os.environ.setdefault("JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES", "-1")
# Most of a test's time is compiling, and most of that is optimisation. XLA_FLAGS= in the environment leaves it on. (An unknown
# flag ends the process, and 0.11 has no other emitters.)
_HAS_OLD_EMITTERS = importlib.metadata.version("jaxlib") < "0.11"
os.environ.setdefault(
    "XLA_FLAGS",
    "--xla_backend_optimization_level=0"
    # On a busy machine simulated devices wait for each other longer than 40 s, after which XLA ends the process.
    " --xla_cpu_collective_call_terminate_timeout_seconds=600"
    + " --xla_cpu_use_fusion_emitters=false"
    * _HAS_OLD_EMITTERS,
)
# jaxlib 0.10.1 logs a long line of error for every program that it loads from the cache.
os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")

import filelock  # noqa: E402
import jax  # noqa: E402
import numpy as np  # noqa: E402
import pytest  # noqa: E402

from tests.forked import collect_garbage_rarely  # noqa: E402
from tests.workdirs import WORDS, train  # noqa: E402

GOLDEN = pathlib.Path(__file__).parent / "golden"


# The files with the longest tests: begun last, one would keep its process busy for minutes while the others have nothing to do.
LONGEST = (
    "test_any_devices.py",
    "test_benchmarks.py",
    "test_continuous_batch.py",
    "test_convert_command.py",
    "test_damage.py",
    "test_faults.py",
    "test_finetune.py",
    "test_harness.py",
    "test_isolation.py",
    "test_learning.py",
    "test_loop.py",
    "test_notebooks.py",
    "test_ownership.py",
    "test_prepare_interrupted.py",
    "test_prepared_training.py",
    "test_processes.py",
    "test_readme.py",
    "test_recipe.py",
    "test_samplers.py",
    "test_soak.py",
    "test_tradeoff.py",
    "test_verify.py",
)


def pytest_xdist_auto_num_workers() -> int:
    """A process more than there are cores, because tests of several processes, signals and servers wait."""
    from calm_jax.parallel.devices import num_cores

    return num_cores() + 1


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """With --no-loadscope-reorder (pyproject.toml), files are begun in this order."""
    items.sort(key=lambda item: item.path.name not in LONGEST)


def pytest_collection_finish() -> None:
    """All test files are imported."""
    collect_garbage_rarely()


@pytest.fixture(scope="module", autouse=True)
def _compiled_programs_of_one_file():
    """Forgets a file's compiled programs at its end.

    On CPUs each is about nine memory maps of the process, of which Linux allows 65,530 (vm.max_map_count). A process of all
    tests came to that number, where jaxlib 0.10.1 ends with a segmentation fault.
    """
    yield
    jax.clear_caches()


@pytest.fixture(scope="session")
def golden() -> pathlib.Path:
    """The folder of the numbers recorded from the published code."""
    return GOLDEN


@pytest.fixture
def pile_folder(tmp_path) -> pathlib.Path:
    """A folder with empty files under the names that launch/prepare_pile.sh expects."""
    (tmp_path / "pile").mkdir()
    for number in range(30):
        (tmp_path / "pile" / f"{number:02}.jsonl.zst").touch()
    (tmp_path / "wikitext.json").write_text(json.dumps({"text": "a text"}) + "\n")
    (tmp_path / "tokenizer.model").touch()
    return tmp_path


@pytest.fixture
def stubs(tmp_path):
    """Stand-ins for the commands that a script of launch/ calls."""
    from tests.launch.stubs import Stubs

    (tmp_path / "stubs").mkdir()
    return Stubs(tmp_path / "stubs")


def made_once(
    factory: pytest.TempPathFactory, name: str, make: Callable[[pathlib.Path], object]
) -> pathlib.Path:
    """A new folder that the first of the tests' processes to need it fills by `make`, and all see."""
    folder = factory.getbasetemp()
    if "PYTEST_XDIST_WORKER" in os.environ:
        folder = folder.parent
    folder /= name
    with filelock.FileLock(f"{folder}.lock"):
        if not folder.exists():
            unfinished = folder.with_name(f"{name} unfinished")
            shutil.rmtree(unfinished, ignore_errors=True)
            unfinished.mkdir()
            make(unfinished)
            unfinished.rename(folder)
    return folder


@pytest.fixture(scope="session")
def text_glob(tmp_path_factory) -> str:
    """The glob of 12 text files of random words."""

    def write(folder: pathlib.Path) -> None:
        rng = np.random.default_rng(0)
        for number in range(12):
            words = rng.choice(WORDS, size=400 + 50 * number)
            (folder / f"{number}.txt").write_text(" ".join(words), encoding="utf-8")

    return f"{made_once(tmp_path_factory, 'text', write)}/*.txt"


@pytest.fixture(scope="session")
def finished(text_glob, tmp_path_factory) -> tuple[pathlib.Path, str]:
    """The workdir of an uninterrupted run of the tiny recipe, which tests may add to, and what the run printed."""

    def run(folder: pathlib.Path) -> None:
        (folder / "printed.txt").write_text(train(text_glob, folder / "run"))

    folder = made_once(tmp_path_factory, "finished", run)
    workdir = tmp_path_factory.mktemp("copy") / "run"
    shutil.copytree(folder / "run", workdir)
    return workdir, (folder / "printed.txt").read_text()
