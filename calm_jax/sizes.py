"""How large a recipe's models are on paper: parameters by part, and the bytes of what is made of them."""

from calm_jax.config import Config
from calm_jax.heads.diffusion import DiffusionHeadConfig
from calm_jax.heads.energy import EnergyHeadConfig
from calm_jax.heads.flow import FlowHeadConfig
from calm_jax.models.autoencoder import AutoencoderConfig
from calm_jax.models.transformer import TransformerConfig

# Parameters by part of a model.
Parameters = dict[str, int]

_BYTES_OF_FLOAT32 = 4
_BYTES = {"bfloat16": 2, "float32": 4}


def _linear(size_in: int, size_out: int) -> int:
    return (size_in + 1) * size_out


def _swiglu(width: int, inner: int) -> int:
    """Gate, up and down, without biases, and the norm before them."""
    return 3 * width * inner + width


def backbone(model: TransformerConfig) -> int:
    """The layers and the last norm."""
    D, A = model.hidden_size, model.head_size
    attention = 2 * D * A * (model.num_heads + model.num_kv_heads) + D
    return model.num_layers * (attention + _swiglu(D, model.intermediate_size)) + D


def _energy_head(head: EnergyHeadConfig, D: int, Z: int) -> int:
    norm = 2 * D
    block = norm + _linear(2 * D, D) + _linear(D, D) + _linear(D, 2 * D) + _linear(D, D)
    before = _linear(head.noise_size, D) + norm + _linear(D, D) + norm
    return before + head.num_blocks * block + norm + _linear(D, D) + _linear(D, Z)


def _adaln(num_blocks: int, D: int, size_in: int, size_out: int) -> int:
    block = _linear(D, 3 * D) + 2 * D + 2 * _linear(D, D)
    before = _linear(256, D) + 2 * _linear(D, D) + _linear(size_in, D)
    return before + num_blocks * block + _linear(D, 2 * D) + _linear(D, size_out)


def _head(config: Config) -> int:
    head, D, Z = config.lm.head, config.lm.model.hidden_size, config.autoencoder.model.latent_size
    if isinstance(head, EnergyHeadConfig):
        return _energy_head(head, D, Z)
    assert isinstance(head, DiffusionHeadConfig | FlowHeadConfig)
    out = 2 * Z if isinstance(head, DiffusionHeadConfig) else Z
    return _adaln(head.num_blocks, D, Z, out)


def language_model(config: Config, vocab_size: int) -> Parameters:
    """What stage 2 trains."""
    model, K = config.lm.model, config.chunk_size
    D = model.hidden_size
    parts = {"token embeddings": vocab_size * D, "backbone": backbone(model)}
    if not config.has_autoencoder:
        return parts | {"vocabulary": D * vocab_size}
    chunks = _linear(K * D, 2 * D) + _linear(2 * D, D) + 2 * D
    return parts | {"chunk embedding": chunks, "head": _head(config)}


def autoencoder(model: AutoencoderConfig, chunk_size: int, vocab_size: int) -> Parameters:
    """What stage 1 trains; its embeddings serve at both ends."""
    D, F, Z, K = model.hidden_size, model.intermediate_size, model.latent_size, chunk_size
    encoder = model.num_encoder_layers * _swiglu(D, F) + D + _linear(K * D, D) + _linear(D, 2 * Z)
    decoder = model.num_decoder_layers * _swiglu(D, F) + D + _linear(Z, D) + _linear(D, K * D)
    return {"token embeddings": vocab_size * D, "encoder": encoder, "decoder": decoder}


def trained(config: Config, stage: str, vocab_size: int) -> Parameters:
    """The parameters of a stage."""
    if stage == "autoencoder":
        return autoencoder(config.autoencoder.model, config.chunk_size, vocab_size)
    return language_model(config, vocab_size)


def frozen(config: Config, stage: str, vocab_size: int) -> Parameters:
    """Those that the stage reads and does not train."""
    if stage == "autoencoder" or not config.has_autoencoder:
        return {}
    return autoencoder(config.autoencoder.model, config.chunk_size, vocab_size)


def state_bytes(config: Config, stage: str, vocab_size: int) -> dict[str, int]:
    """Bytes of what lasts from step to step, over all devices, and of the gradients: all of it float32.

    The optimizer's are Adam's two moments; its counters and the metrics are left out.
    """
    ours = sum(trained(config, stage, vocab_size).values()) * _BYTES_OF_FLOAT32
    others = sum(frozen(config, stage, vocab_size).values()) * _BYTES_OF_FLOAT32
    return {"parameters": ours, "optimizer": 2 * ours, "gradients": ours, "frozen": others}


def cache_bytes(config: Config, batch: int, context: int) -> int:
    """Bytes of the keys and values of `batch` texts of `context` tokens."""
    model = config.lm.model
    chunks = -(-context // config.chunk_size)
    each = 2 * model.num_layers * model.num_kv_heads * model.head_size
    return batch * chunks * each * _BYTES[config.compute_dtype]


def fsdp_traffic(
    config: Config, stage: str, vocab_size: int, microbatches: int, data: int, fsdp: int
) -> float:
    """Bytes that each device receives in a step of ideal fully sharded training, where nothing moves but this.

    For each microbatch: every trained parameter gathered once forward and, but for the embeddings, whose gradient has no use
    for them, once backward, and its gradient scattered once, in the precision of the arithmetic; of the frozen autoencoder, its encoder and embeddings once, in float32. And for each
    step, where the mesh has a data axis, the sum over it of a device's shard of the gradients, there and back.
    """
    own, size = trained(config, stage, vocab_size), _BYTES[config.compute_dtype]
    ours = sum(own.values()) * size
    # The autoencoder's are its logits' weights, too.
    once = own["token embeddings"] * size if stage == "lm" else 0
    parts = frozen(config, stage, vocab_size)
    read = parts.get("encoder", 0) + parts.get("token embeddings", 0)
    whole = microbatches * (3.0 * ours - once + read * _BYTES_OF_FLOAT32)
    return whole * (fsdp - 1) / fsdp + 2 * (data - 1) / data * ours / fsdp
