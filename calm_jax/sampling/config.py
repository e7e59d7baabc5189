"""The options of sampling and generation: `SamplerConfig` for one chunk, `SampleConfig` for whole texts."""

import dataclasses
import math

from calm_jax.errors import UserError, require_at_least, require_one_of, shown
from calm_jax.sampling import temperature as law

# The most draws for one chunk, and the most that are compared in pairs (16 MiB of comparisons for 4096 draws).
_MOST_DRAWS, MOST_COMPARED = 2**24, 4096
# The most candidates that can be returned with each chunk (`shown_candidates`).
_MOST_SHOWN = 64
# From here on the likeliest tokens of the token prior are certain; scaled logits stay far below the largest float32.
_LARGEST_SCALE = 1e6
# Samplers that make `num_candidates` draws for each chunk; the others make as many as they need, up to `max_draws`.
FIXED_POOL = ("batch", "published")

# Options that have no meaning for the autoregressive baseline.
CALM_ONLY = (
    "sampler",
    "num_candidates",
    "max_draws",
    "draws_at_once",
    "prompt_alignment",
    "shown_candidates",
    "token_prior_scale",
)


@dataclasses.dataclass(frozen=True)
class SamplerConfig:
    """The part of `config.sample` that decides how one chunk is drawn; every key is described in `configs/common.py`.

    It is a static argument of jitted functions: each different config compiles anew.
    """

    temperature: float
    sampler: str
    num_candidates: int
    max_draws: int
    draws_at_once: int
    top_p: float
    shown_candidates: int = dataclasses.field(default=0, kw_only=True)
    token_prior_scale: float = dataclasses.field(default=1.0, kw_only=True)

    def __post_init__(self):
        if not 0 < self.top_p <= 1:
            raise UserError(f"top_p={shown(self.top_p)} must be in (0, 1]")
        for name in ("num_candidates", "max_draws", "draws_at_once"):
            if not 1 <= getattr(self, name) <= _MOST_DRAWS:
                raise UserError(
                    f"{name}={getattr(self, name)} must be at least 1 and at most {_MOST_DRAWS}"
                )
        if not 0 <= self.shown_candidates <= _MOST_SHOWN:
            raise UserError(
                f"shown_candidates={self.shown_candidates} must be from 0 to {_MOST_SHOWN}"
            )
        if not 0 <= self.token_prior_scale <= _LARGEST_SCALE:
            raise UserError(
                f"token_prior_scale={shown(self.token_prior_scale)} must be from 0 to {_LARGEST_SCALE:g}"
            )
        # The samplers of a single pool compare all its draws in pairs.
        name = "num_candidates" if self.sampler in FIXED_POOL else "max_draws"
        if self.sampler in (*FIXED_POOL, "growing") and getattr(self, name) > MOST_COMPARED:
            raise UserError(
                f"{name}={getattr(self, name)} must be at most {MOST_COMPARED} with sampler={self.sampler!r}, which compares "
                "all draws in pairs"
            )

    def check_token_prior(self, weight: float) -> None:
        """Raises `UserError` if a prior is to be scaled that is not there. `weight`: the model's `lm.token_prior_weight`."""
        if self.token_prior_scale != 1 and not weight:
            raise UserError(
                f"token_prior_scale={shown(self.token_prior_scale)} scales the token prior, and this model has none "
                "(lm.token_prior_weight=0): give 1 (in a recipe --config.sample.token_prior_scale=1)"
            )

    def check_head(self, has_autoencoder: bool) -> None:
        """Raises `UserError` if these options cannot be used with the model's head, a latent one where it has an autoencoder."""
        if has_autoencoder:
            self.check_latent_head()
        else:
            self.check_softmax_head()

    def check_softmax_head(self) -> None:
        """Raises `UserError` if these options cannot be used with the autoregressive baseline."""
        if not 0 <= self.temperature < math.inf:
            raise UserError(f"temperature={shown(self.temperature)} must be at least 0 and finite")

    def check_latent_head(self) -> None:
        """Raises `UserError` if these options cannot be used with a latent head, which can only be sampled."""
        n, a = law.split_exponent(self.temperature)
        if self.top_p != 1:
            raise UserError(
                f"top_p={shown(self.top_p)} needs the probabilities of tokens, which only lm.head.name='softmax' knows; with "
                "other heads, lower the temperature below 1 instead"
            )
        if self.sampler == "published" and a:
            raise UserError(
                f"temperature={shown(self.temperature)}: sampler='published' takes only 1, 1/2, 1/3, ...; sampler='batch' "
                "and 'pooled' take any temperature in (0, 1]"
            )
        least = n + (a > 0)
        if self.sampler in ("pooled", "rejection", "growing") and self.max_draws < least:
            raise UserError(
                f"max_draws={self.max_draws} must be at least {least} at temperature={shown(self.temperature)}, which compares "
                f"{least} draws: raise it, or the temperature"
            )


@dataclasses.dataclass(frozen=True)
class SampleConfig(SamplerConfig):
    """`config.sample`; every key is described in `configs/common.py`."""

    max_tokens: int
    stop: tuple[str, ...]
    prompt_alignment: str
    long_context: str
    batch_size: int
    prompts: tuple[str, ...]

    def __post_init__(self):
        super().__post_init__()
        require_at_least(1, self, "", "max_tokens", "batch_size")
        if isinstance(self.stop, str):
            raise UserError(f"stop={self.stop!r} must be a tuple of strings")
        if "" in self.stop:
            raise UserError(
                "stop='' would end every text before it begins: leave the empty string out"
            )
        if self.prompt_alignment not in ("left", "pad", "match"):
            raise UserError(
                f"prompt_alignment={self.prompt_alignment!r} must be 'left' (pads before the text, as "
                "lm.data.front_fill='random' trains it), 'match' (draws the chunk that the prompt ends in until one "
                "begins with the prompt's last tokens) or 'pad' (pads after the prompt, as the published code does)"
            )
        if self.prompt_alignment == "match" and self.max_draws > MOST_COMPARED:
            raise UserError(
                f"max_draws={self.max_draws} must be at most {MOST_COMPARED} with prompt_alignment='match', which compares "
                "all draws in pairs"
            )
        require_one_of("long_context", self.long_context, ("refuse", "slide"))

    @property
    def sampler_config(self) -> SamplerConfig:
        """The options that decide how one chunk is drawn; compiled programs depend on no others."""
        names = [field.name for field in dataclasses.fields(SamplerConfig)]
        return SamplerConfig(**{name: getattr(self, name) for name in names})

    @property
    def batch_config(self) -> SamplerConfig:
        """`sampler_config` with one value for the options that change no text at this temperature.

        Texts share a batch and its compiled programs if this is equal. At T = 1 every sampler is one draw of the model.
        `max_draws` is kept, because `prompt_alignment="match"` reads it at every temperature.
        """
        config = self.sampler_config
        if self.temperature == 1:
            config = dataclasses.replace(config, sampler="noise", num_candidates=1)
        return config
