"""Bad input ends a command with status 2 and one line that has the key and the value; nothing is written."""

import shutil
import sys

import pytest
from absl import flags

from calm_jax.cli.flags import parse_flags
from tests.tiny_model import run_generate, tiny
from tests.workdirs import ROOT, run, train


@pytest.fixture
def text(tmp_path):
    for number in range(9):
        (tmp_path / f"{number}.txt").write_text(f"some text, number {number}. " * 30)
    return f"{tmp_path}/*.txt"


def refuse(capsys, monkeypatch, *args: str) -> str:
    """Runs `python -m calm_jax.main ARGS` in this process, which must fail, and returns its only line on stderr."""
    from calm_jax import main

    values = flags.FLAGS
    values.unparse_flags()
    for override in [name for name in values if name.startswith("config.")]:
        delattr(values, override)
    # ml_collections reads the overridden keys from sys.argv.
    monkeypatch.setattr(sys, "argv", ["main", *args])
    with pytest.raises(SystemExit) as exit_:
        main.main(parse_flags(["main", *args]))
    assert exit_.value.code == 2
    out = capsys.readouterr()
    lines = out.err.strip().splitlines()
    assert len(lines) == 1 and lines[0].startswith("error: "), out.err
    return lines[0]


# A flag, and what the message must contain. Values that `resolve` refuses are in tests/test_config.py; beta stands for all of them.
BAD_VALUES = {
    "--config.lm.head.beta=0.0": "lm.head.beta=0",
    "--config.stage=lm": "stage='lm' needs an autoencoder",
    "--config.tokenizer.kind=llama3": "tokenizer.path",
    "--config.mesh.fsdp=7": "mesh:",
    "--config.data.train_files=/nowhere/*.txt": "/nowhere/*.txt",
    "--config.autoencoder.checkpoint=/nowhere": "autoencoder.checkpoint='/nowhere'",
    "--config.tokenizer.path=s3://b/t": "tokenizer.path=s3://b/t must be a path of a file system",
    "--config.init_from=s3://bucket/run": "init_from=s3://bucket/run must be a path of a file system",
    "--config.lm.data.block_tokens=100000": "100000",
    "--num_steps=8": "are given as --config.autoencoder.training.num_steps or --config.lm.training.num_steps",
    "--training.batch_size=8": "as --config.autoencoder.training.batch_size or --config.lm.training.batch_size",
    "--config.data.block_tokens=8": "it is in another section: --config.autoencoder.data.block_tokens or ",
    "--config.lm.optimiser.learning_rate=1": "did you mean 'optimizer'",
    "--temprature=8": "Unknown command line flag 'temprature'",
    "--config.lm.model.hidden_sise=8": "did you mean 'hidden_size'",
    "--config.lm.model.hidden_size=1e3": "1e3",
    "--profile=5": "--profile='5'",
    f"--profile=1:{'9' * 5000}": "--profile='1:999",
    "--mode=evaluate": "evaluate",
}


@pytest.mark.parametrize("option", BAD_VALUES)
def test_the_message_names_a_bad_value(option, text, tmp_path, capsys, monkeypatch):
    workdir = tmp_path / "run"
    recipe = f"--config=tests/tiny_recipe.py:{text}"
    assert BAD_VALUES[option] in refuse(capsys, monkeypatch, recipe, f"--workdir={workdir}", option)
    assert not workdir.exists()


def test_a_language_model_that_can_never_fit_is_refused_before_stage_1(
    text, tmp_path, capsys, monkeypatch
):
    line = refuse(
        capsys,
        monkeypatch,
        f"--config=tests/tiny_recipe.py:{text}",
        f"--workdir={tmp_path / 'run'}",
        "--config.lm.training.accumulation_steps=0",
        "--config.lm.model.hidden_size=4000000",
    )
    assert "lm.model.hidden_size=4000000 take over" in line and "smaller model" in line
    assert not (tmp_path / "run").exists()


def test_a_remote_workdir_is_refused_before_anything_is_done(text, tmp_path, capsys, monkeypatch):
    """`pathlib` would make a local folder `gs:`."""
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    tiny_recipe = f"--config={ROOT}/tests/tiny_recipe.py:{text}"
    for flags_ in (
        [tiny_recipe, "--workdir=gs://bucket/run"],
        [tiny_recipe, "--workdir=gs://bucket/run", "--overwrite"],
        [tiny_recipe, "--workdir=gs://bucket/run", "--mode=eval"],
        [tiny_recipe, "--workdir=3x://bucket/run"],
        [f"--config={ROOT}/configs/workdir.py:gs://bucket/run"],
        [f"--config={ROOT}/configs/finetune.py:gs://bucket/run"],
        ["--config=gs://bucket/recipe.py"],
    ):
        line = refuse(capsys, monkeypatch, *flags_)
        given = next(flag for flag in flags_ if "://" in flag).replace(f"{ROOT}/", "")
        assert f"{given} must be a path of a file system" in line
    assert not list((tmp_path / "here").iterdir())


def test_fine_tuning_gives_one_hint_for_a_missing_folder_and_another_for_a_published_one(
    tmp_path, capsys, monkeypatch
):
    (tmp_path / "config.json").write_text('{"ae_path": 1}')
    for folder, end in (
        (tmp_path / "no", "is no workdir: there is no such folder; give the folder of a run"),
        (tmp_path, "; convert a published checkpoint first"),
    ):
        line = refuse(capsys, monkeypatch, f"--config=configs/finetune.py:{folder}")
        assert line.endswith(end) and line.count(";") == 1


def test_an_argument_for_a_recipe_that_takes_none_is_refused(capsys, monkeypatch):
    line = refuse(capsys, monkeypatch, "--config=configs/ar_s.py:head=flow")
    assert "configs/ar_s.py:head=flow: this recipe takes no argument" in line


# A recipe file, and what the message must contain.
BAD_RECIPES = {
    "x = 1 / 0": "ZeroDivisionError: division by zero",
    "assert False": "AssertionError",
    "x = missing": "NameError: name 'missing' is not defined",
    "import no_such_module": "ModuleNotFoundError: No module named 'no_such_module'",
    "open('/nowhere/x')": "FileNotFoundError: [Errno 2] No such file or directory: '/nowhere/x'",
    "x = 1": "KeyError: 'get_config'",
    "def get_config(: pass": "SyntaxError: invalid syntax (recipe.py, line 1)",
    "def get_config(): raise ValueError('two\\nlines')": "ValueError: two lines",
    "def get_config(x): pass": "TypeError: get_config() missing 1 required positional argument: 'x'",
}


@pytest.mark.parametrize("content", BAD_RECIPES)
def test_the_message_names_a_recipe_that_fails_and_its_error(
    content, tmp_path, capsys, monkeypatch
):
    recipe = tmp_path / "recipe.py"
    recipe.write_text(content)
    line = refuse(capsys, monkeypatch, f"--config={recipe}", "--config.seed=1")
    assert line == f"error: --config={recipe}: {BAD_RECIPES[content]}"


def test_two_recipes_are_refused(capsys, monkeypatch):
    recipes = "--config=configs/calm_m.py", "--config=configs/calm_l.py"
    line = refuse(capsys, monkeypatch, *recipes, "--config.seed=1")
    assert line == f"error: {' and '.join(recipes)}: give one recipe"


def test_the_message_names_a_bad_recipe_argument(capsys, monkeypatch):
    """All of them are in tests/test_config.py, as are the values that a head does not support."""
    line = refuse(capsys, monkeypatch, "--config=configs/quickstart.py:head=nope")
    assert line.startswith("error: head='nope' is none of energy, diffusion, flow, softmax")


# A text file: its content, and what the message must contain.
BAD_TEXT = {
    "broken.jsonl": (b'{"text": "good"}\n{"text": \n', "broken.jsonl, line 2"),
    "field.json": (b'{"body": "no text"}\n', "no field 'text'"),
    "number.jsonl": (b'{"text": 7}\n', "is int, not a string"),
    "latin.txt": ("caf\u00e9".encode("latin-1"), "byte 3 is not valid UTF-8"),
    "latin.jsonl": (b'{"text": "caf\xe9"}\n', "is not valid UTF-8"),
    "empty.jsonl": (b"", "holds no text"),
}


@pytest.mark.parametrize("name", BAD_TEXT)
def test_the_message_names_the_place_of_bad_text(name, tmp_path, capsys, monkeypatch):
    content, expected = BAD_TEXT[name]
    (tmp_path / name).write_bytes(content)
    recipe = f"--config=tests/tiny_recipe.py:{tmp_path / name}"
    assert expected in refuse(capsys, monkeypatch, recipe, f"--workdir={tmp_path / 'run'}")


@pytest.mark.slow
def test_a_batch_size_that_the_devices_do_not_divide_is_refused(text, tmp_path):
    """In a process of its own, which is given two devices."""
    line = train(
        text,
        tmp_path / "run",
        "--config.lm.training.batch_size=5",
        # As many devices as there are (-1) would be as many as 5 divides over.
        "--config.mesh.data=2",
        status=2,
        xla_flags="--xla_force_host_platform_device_count=2",
    )
    assert "lm.training.batch_size=5 must be a multiple of" in line


GENERATE = {
    "--workdir=/nowhere": "/nowhere is no workdir",
    "--workdir=": "--workdir=DIR",
}


@pytest.mark.slow
@pytest.mark.parametrize("option", GENERATE)
def test_generation_refuses_a_folder_without_a_model(option):
    assert GENERATE[option] in run("calm_jax.generate", option, "--prompt=x", status=2)


# The head of the model and flags of the generate command, of which the last is bad, and what the message must contain. One for each
# key of the config, whose checks have tests in tests/sampling.
SAMPLE = {
    ("energy", "--temperature=1.0000001"): "--temperature=1.0000001 must be in (0, 1]",
    ("energy", "--temperature=3/2"): "--temperature=1.5 must be in (0, 1]",
    ("energy", "--temperature=nan"): "--temperature=nan must be in (0, 1]: draws can be sharpened",
    ("energy", "--temperature=-1"): "--temperature=-1 must be in (0, 1]: draws can be sharpened",
    ("energy", "--top_p=0.9"): "--top_p=0.9 needs the probabilities of tokens",
    # T = 1/5 compares 5 draws.
    ("energy", "--temperature=0.2", "--max_draws=4"): "--max_draws=4 must be at least 5",
    (
        "energy",
        "--temperature=0.7",
        "--sampler=published",
    ): "--temperature=0.7: sampler='published'",
    ("energy", "--sampler=greedy"): "--sampler='greedy' is none of pooled, batch, published",
    (
        "energy",
        "--token_prior_scale=2",
    ): "token_prior_scale=2 scales the token prior, and this model",
    ("energy", "--num_candidates=0"): "--num_candidates=0 must be at least 1",
    ("energy", "--draws_at_once=0"): "--draws_at_once=0 must be at least 1",
    ("energy", "--max_tokens=0"): "--max_tokens=0 must be at least 1",
    ("energy", "--batch_size=0"): "--batch_size=0 must be at least 1",
    ("energy", "--stop="): "--stop=''",
    ("energy", "--prompt_alignment=right"): "--prompt_alignment='right' must be",
    ("energy", "--long_context=cut"): "--long_context='cut' is none of refuse, slide",
    ("energy", "--seed=-1"): "--seed=-1 must be in [0, 2**32)",
    ("energy", "--seed=4294967296"): "--seed=4294967296 must be in",
    ("energy", "--max_tokens=2000"): "prompt 0 has 2 tokens; with max_tokens=2000",
    # Python passes a byte that is not UTF-8 as a lone surrogate.
    ("energy", "--prompt=\udcff"): "prompt 0, '\\udcff', is not valid Unicode text",
    (
        "energy",
        "--prompt=x",
        "--prompt=a\udcffb",
    ): "prompt 1, 'a\\udcffb', is not valid Unicode text",
    ("softmax", "--sampler=batch"): "--sampler=batch has no meaning for lm.head.name='softmax'",
    ("softmax", "--max_draws=9"): "--max_draws=9 has no meaning",
    ("softmax", "--num_candidates=9"): "--num_candidates=9 has no meaning",
    ("softmax", "--draws_at_once=9"): "--draws_at_once=9 has no meaning",
    ("softmax", "--prompt_alignment=match"): "--prompt_alignment=match has no meaning",
    ("softmax", "--temperature=-0.5"): "--temperature=-0.5 must be at least 0 and finite",
    ("softmax", "--top_p=1.5"): "--top_p=1.5 must be in (0, 1]",
}
# The name of a --prompts_file, its content, and what the message must contain.
PROMPTS_FILES = [
    ("half.jsonl", b'{"prompt": "x"}\n{"prompt": \n', "half.jsonl': line 2 is no"),
    ("key.jsonl", b'{"text": "x"}\n', "line 1 is no"),
    ("list.jsonl", b'["x"]\n', "line 1 is no"),
    ("number.jsonl", b'{"prompt": 7}\n', "line 1 is no"),
    ("floats.jsonl", b'{"prompt": [1, 2.5]}\n', "line 1 is no"),
    ("truths.jsonl", b'{"prompt": [true]}\n', "line 1 is no"),
    ("gap.jsonl", b'{"prompt": "x"}\n\n{"prompt": "y"}\n', "line 2 is no"),
    (
        "ids.jsonl",
        b'{"prompt": [259]}\n',
        "prompt 0: token id 259 is not in the vocabulary, [0, 259)",
    ),
    ("more.jsonl", b'{"prompt": "x"}\n{"prompt": [3, -1]}\n', "prompt 1: token id -1 is not in"),
    (
        "half_pair.jsonl",
        b'{"prompt": "\\ud800"}\n',
        "prompt 0, '\\ud800', is not valid Unicode text",
    ),
    ("latin.txt", b"caf\xe9\n", "latin.txt': byte 3 is not valid UTF-8"),
    ("latin.jsonl", b'{"prompt": "caf\xe9"}\n', "is not valid UTF-8"),
    ("empty.txt", b"", "empty.txt' is empty"),
    ("many.txt", b"\n" * 1_000_001, "has 1000001 prompts, and a command takes at most 1000000"),
    ("large.txt", b"x" * (2**27 + 1), "large.txt' has more than 128 MiB"),
    ("nowhere/x.txt", None, "x.txt' cannot be read: No such file or directory"),
]


# More characters than a name may have.
LONG = "x" * 300


@pytest.fixture(scope="module")
def refusals(tmp_path_factory):
    """The result of the generate command for each case of `SAMPLE`, `PROMPTS_FILES` and some more, all in one process."""
    folder = tmp_path_factory.mktemp("generate")
    commands = {}
    for head in ("energy", "softmax"):
        tiny(f"head={head}").save(folder / head)
    for head, *options in SAMPLE:
        given = [option for option in options if option.startswith("--prompt=")] or ["--prompt=x"]
        others = [option for option in options if not option.startswith("--prompt=")]
        commands[head, *options] = [f"--workdir={folder / head}", *given, *others]
    model = f"--workdir={folder / 'energy'}"
    for name, content, _ in PROMPTS_FILES:
        if content is not None:
            (folder / name).write_bytes(content)
        commands[name] = [model, f"--prompts_file={folder / name}"]
    (folder / "there.jsonl").write_text("work of days")
    commands["there"] = [model, "--prompt=x", f"--output={folder / 'there.jsonl'}"]
    commands["no folder"] = [model, "--prompt=x", f"--output={folder / 'no' / 'x.jsonl'}"]
    commands["no prompt"] = [model]
    commands["remote"] = ["--workdir=gs://bucket/run", "--prompt=x"]
    commands["remote output"] = [model, "--prompt=x", "--output=s3://bucket/x.jsonl"]
    commands["long"] = [f"--workdir={LONG}", "--prompt=x"]
    commands["long output"] = [model, "--prompt=x", f"--output={LONG}"]
    # A run that has not begun to train its language model.
    untrained = folder / "untrained"
    shutil.copytree(folder / "energy", untrained, ignore=shutil.ignore_patterns("lm"))
    commands["untrained"] = [f"--workdir={untrained}", "--prompt=x"]
    without = folder / "no_tokenizer"
    shutil.copytree(folder / "energy", without, ignore=shutil.ignore_patterns("tokenizer"))
    commands["no tokenizer"] = [f"--workdir={without}", "--prompt=x"]
    results = dict(zip(commands, run_generate(*commands.values()), strict=True))
    assert (folder / "there.jsonl").read_text() == "work of days"
    return results


def assert_refused(result, expected):
    status, out, err = result
    assert status == 2, err
    assert out.strip() in ("", "x")  # nothing, or the prompt
    (line,) = err.strip().splitlines()
    assert line.startswith("error: ") and expected in line


@pytest.mark.parametrize("case", SAMPLE, ids=lambda case: ascii(" ".join(case)))
def test_generation_refuses_options_that_the_model_does_not_support(case, refusals):
    assert_refused(refusals[case], SAMPLE[case])


@pytest.mark.parametrize(("name", "content", "expected"), PROMPTS_FILES)
def test_generation_names_the_bad_line_of_a_prompts_file(name, content, expected, refusals):
    assert_refused(refusals[name], expected)


@pytest.mark.parametrize(
    ("case", "expected"),
    [
        ("there", "there.jsonl already exists: give another name, or --overwrite"),
        ("no folder", "x.jsonl cannot be written: there is no such folder"),
        ("no prompt", "give a --prompt=TEXT"),
        ("remote", "--workdir=gs://bucket/run must be a path of a file system"),
        ("remote output", "--output=s3://bucket/x.jsonl must be a path of a file system"),
        ("long", f"{LONG}/config.json cannot be read: File name too long"),
        ("long output", f"--output={LONG} cannot be written: File name too long"),
        ("untrained", "lm holds no checkpoint: train first"),
        ("no tokenizer", "tokenizer holds no readable tokenizer"),
    ],
)
def test_generation_names_a_file_that_is_missing_or_would_be_replaced(case, expected, refusals):
    assert_refused(refusals[case], expected)
