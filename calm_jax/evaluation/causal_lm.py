"""Samples of a Hugging Face causal language model (extra `hf`)."""

from collections.abc import Callable, Sequence
from typing import Any

from calm_jax.errors import UserError, installation, reason_of

# New tokens of a sample: enough that its text nearly always has at least four tokens of any other tokenizer.
_NEW_TOKENS = 16


class CausalLM:
    """A causal language model from a folder or from the Hugging Face hub, to sample from at temperature 1.

    Raises `UserError` if the libraries cannot be imported or the model cannot be loaded.
    """

    def __init__(self, name: str, seed: int):
        try:
            import torch
            import transformers
        except ImportError as error:
            raise UserError(
                f"--model=hf:{name} needs {error.name or reason_of(error)}, which cannot be imported: {installation('hf')}"
            ) from error
        transformers.utils.logging.disable_progress_bar()
        try:
            self._tokenizer: Any = transformers.AutoTokenizer.from_pretrained(
                name, trust_remote_code=False
            )
            self._model: Any = transformers.AutoModelForCausalLM.from_pretrained(
                name, trust_remote_code=False
            )
        except (OSError, ValueError) as error:
            raise UserError(f"--model=hf:{name} cannot be loaded ({reason_of(error)})") from error
        self._model.to("cuda" if torch.cuda.is_available() else "cpu").eval()
        self._seed = seed

    def sample(
        self, contexts: Sequence[str], num_samples: int, done: Callable[[int], None]
    ) -> list[list[str]]:
        """Draws `num_samples` continuations of every context from the model's own distribution.

        A context that is too long for the model loses its first tokens.

        Args:
            contexts: text.
            num_samples: continuations of each.
            done: called after each context with the number of contexts done so far.
        """
        import torch
        import transformers

        torch.manual_seed(self._seed)
        config = self._model.config
        longest = getattr(config, "max_position_embeddings", 2**31) - _NEW_TOKENS
        ends = [id for id in (config.bos_token_id, config.eos_token_id) if isinstance(id, int)]
        # The model's own settings, such as a temperature, are not used.
        options = transformers.GenerationConfig(
            do_sample=True,
            temperature=1.0,
            top_k=0,
            top_p=1.0,
            max_new_tokens=_NEW_TOKENS,
            num_return_sequences=num_samples,
            eos_token_id=config.eos_token_id,
            pad_token_id=ends[-1] if ends else 0,
        )
        samples = []
        for number, context in enumerate(contexts, 1):
            ids = self._tokenizer(context)["input_ids"][-longest:] or ends[:1]
            if not ids:
                raise UserError("an empty context needs a model with a bos or an eos token")
            given = torch.tensor([ids], device=self._model.device)
            with torch.inference_mode():
                rows = self._model.generate(
                    given, attention_mask=torch.ones_like(given), generation_config=options
                )
            # A tokenizer may drop a space at the beginning of a text that it decodes, so that samples are decoded together with
            # their context.
            begin = len(self._decode(ids))
            samples.append([self._decode(row)[begin:] for row in rows.tolist()])
            done(number)
        return samples

    def _decode(self, ids: list[int]) -> str:
        return self._tokenizer.decode(
            ids, skip_special_tokens=True, clean_up_tokenization_spaces=False
        )
