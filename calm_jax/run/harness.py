"""A workdir as a model of EleutherAI's lm-evaluation-harness (extra `eval`): `HarnessModel`."""

import collections
import dataclasses
import logging
from collections.abc import Sequence
from typing import Any, NoReturn

from lm_eval.api.instance import Instance
from lm_eval.api.model import LM
from lm_eval.models.utils import normalize_gen_kwargs

from calm_jax.cli import progress
from calm_jax.cli.files import local_path
from calm_jax.config import as_dict, resolve
from calm_jax.errors import UserError
from calm_jax.run.generator import Generator
from calm_jax.run.workdir import Workdir
from calm_jax.sampling.config import SampleConfig

# Defaults for tasks that do not set these options: as many new tokens as the harness's own models generate, and only the last
# chunks of a prompt that is longer than the model's context.
_CONVENTIONS = {"max_tokens": 256, "long_context": "slide"}


class HarnessModel(LM):
    """A trained language model that answers the requests of generative tasks (`generate_until`).

    A text depends on the seed, its task, its place among the task's requests and the options. It does not depend on the
    other tasks of the call or on the batch size.
    """

    def __init__(
        self,
        workdir: str = "",
        seed: int = 0,
        batch_size: int | str = 1,
        max_batch_size: int | None = None,
        device: str | None = None,
        **sample: Any,
    ):
        """Loads a model.

        Args:
          workdir: the run.
          seed: the seed of all random numbers, in [0, 2**32).
          batch_size: prompts continued together; with 1, the harness's default, and "auto", the run's `sample.batch_size`.
          max_batch_size, device: the harness passes them, and they are ignored. The model is on all available devices.
          **sample: values for keys of the run's section `sample`, such as `temperature=0.5`. The defaults of `max_tokens`
            and `long_context` are 256 and "slide".

        Raises:
          UserError: if there is no such model, or an option has a value that is not allowed.
        """
        super().__init__()
        if not workdir:
            raise UserError("give the folder of a trained model: --model_args workdir=DIR")
        options = _CONVENTIONS | sample
        if not str(batch_size).startswith("auto") and batch_size not in (1, "1"):
            if not str(batch_size).isdecimal():
                raise UserError(f"--batch_size={batch_size} must be a whole number or auto")
            options["batch_size"] = int(batch_size)
        tree = as_dict(Workdir(local_path(str(workdir), "workdir")).config)
        config = resolve(tree | {"seed": seed, "sample": tree["sample"] | options})
        self._sample, self._seed = config.sample, config.seed
        self._generator = Generator.load(workdir)
        self._has_warned = False

    def generate_until(self, requests: Sequence[Instance], disable_tqdm: bool = False) -> list[str]:
        """Continues the context of every request up to one of its stop strings, eos or its number of tokens.

        Raises `UserError` for options that the model cannot take, before anything is generated.
        """
        groups: dict[tuple[str, SampleConfig], list[int]] = collections.defaultdict(list)
        for place, request in enumerate(requests):
            groups[request.task_name or "", self._options(request)].append(place)
        # `finish_each` checks the prompts here, and generates a text when the loop below asks for it.
        running = []
        for (_, options), places in groups.items():
            prompts = [requests[place].args[0] for place in places]
            running.append((places, self._generator.finish_each(prompts, options, self._seed)))
        texts = [""] * len(requests)
        shown = not disable_tqdm
        with progress.Countdown("generating", len(requests), "texts", shown) as countdown:
            for places, continuations in running:
                for one in continuations:
                    place = places[one.index]
                    texts[place] = one.text
                    self.cache_hook.add_partial("generate_until", requests[place].args, one.text)
                    countdown.add(1)
        return texts

    def loglikelihood(self, requests: Sequence[Instance]) -> NoReturn:
        """Raises `UserError`: CALM has no likelihood."""
        self._refuse(requests[0])

    def loglikelihood_rolling(self, requests: Sequence[Instance]) -> NoReturn:
        """Raises `UserError`: CALM has no likelihood."""
        self._refuse(requests[0])

    @property
    def tokenizer_name(self) -> NoReturn:
        """The harness reads it only to apply a chat template. Raises `UserError`: models of calm_jax have none."""
        raise UserError(
            "--apply_chat_template needs a chat template, which models of calm_jax do not have: leave it out"
        )

    def _refuse(self, request: Instance) -> NoReturn:
        raise UserError(
            f"the task {request.task_name} asks for likelihoods ({request.request_type}), which CALM does not have, as it can "
            "only be sampled: choose tasks with output_type: generate_until, or score text with BrierLM "
            "(python -m calm_jax.main --mode=eval)"
        )

    def _options(self, request: Instance) -> SampleConfig:
        """How to sample for a request, by its task's `generation_kwargs`."""
        given: dict[str, Any] = dict(normalize_gen_kwargs(request.args[1], self._sample.max_tokens))
        changes: dict[str, Any] = {
            "max_tokens": given.pop("max_gen_toks"),
            "stop": tuple(word for word in given.pop("until") if word),
        }
        temperature, top_p = given.pop("temperature", 1.0), given.pop("top_p", 1.0)
        if given.pop("do_sample") and temperature:
            changes |= {"temperature": temperature, "top_p": top_p}
        elif not self._generator.has_autoencoder:
            changes |= {"temperature": 0.0, "top_p": 1.0}
        elif not self._has_warned:
            self._has_warned = True
            logging.getLogger(__name__).warning(
                "CALM has no greedy decoding: tasks that ask for it are sampled at temperature %g, by the sampler %r "
                "(--model_args temperature=T changes it)",
                self._sample.temperature,
                self._sample.sampler,
            )
        if given.get("num_beams") == 1:
            del given["num_beams"]
        if given:
            name, value = next(iter(given.items()))
            raise UserError(
                f"the task {request.task_name} asks for {name}={value!r}, which calm_jax does not have: leave it out of "
                "generation_kwargs"
            )
        return dataclasses.replace(self._sample, **changes)
