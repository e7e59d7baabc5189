"""The suite `eval`: one batch of an evaluation, loss and BrierLM, of CALM with the recipe's K and with K = 1, and of the baseline.

FLOPs are not counted: `calm_jax.cost` has no formula for an evaluation. With fresh parameters all draws of the energy head decode to the
same tokens, so that with K = 1 all starts of n-grams are continued, which is the most that an evaluation can cost; those of the
baseline are rarely equal, which is the least (see `calm_jax.brier`).
"""

import functools

import jax
import numpy as np
from ml_collections import ConfigDict

from benchmarks.measure import Cases, Options, Record, fresh_params, measured, random_tokens
from benchmarks.suites.train import variant
from calm_jax.build import stage_of
from calm_jax.config import resolve
from calm_jax.data.tokenizers import vocabulary
from calm_jax.evaluation.evaluator import jit_sums
from calm_jax.parallel.mesh import global_batch, make_mesh, rows_here


def cases(options: Options) -> Cases:
    """CALM at the recipe's K and at K = 1, and the baseline. For a recipe of the baseline, only the baseline."""
    tree = options.tree
    trees = {"eval:softmax": variant(tree, "head=softmax")}
    if tree.lm.head.name != "softmax":
        calm = {f"eval:k={tree.chunk_size}": tree}
        if tree.chunk_size != 1:
            calm["eval:k=1"] = variant(tree, "k=1")
        trees = calm | trees
    return {name: functools.partial(_batch, options, name, one) for name, one in trees.items()}


def _batch(options: Options, name: str, tree: ConfigDict) -> list[Record]:
    config = resolve(tree)
    words, mesh = vocabulary(config.tokenizer), make_mesh(config.mesh)
    task, source, _ = stage_of(config, "lm", words)
    size, block = config.eval.batch_size, config.lm.data.block_tokens
    key, mine = jax.random.key(config.seed), rows_here(size, mesh)
    tokens_BT = random_tokens(words, size, block)[mine]

    with jax.set_mesh(mesh):
        params = fresh_params(task, key, mesh)
        frozen = {} if source is None else {"params": fresh_params(source, key, mesh)}
        index_B = np.asarray(mine, np.int32)
        rows = {"tokens": tokens_BT, "targets": tokens_BT, "index": index_B}
        batch = global_batch(rows, size, mesh)
    sums = jit_sums("lm", task, config.eval, mesh)

    def run() -> object:
        with jax.set_mesh(mesh):
            return sums(params, frozen, batch)

    tokens = size * block
    return [measured("eval", name, run, options, tokens, config.compute_dtype, mesh.size)]
