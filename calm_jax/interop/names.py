"""Maps published tensors to parameters and back, by one table for each kind of model.

A table is a list of `Row`s, one for each parameter. Parameters of layers are stacked along their first axis here, and
separate tensors in the published code: `{i}` in a row's published name stands for the layer.
"""

import dataclasses
from collections.abc import Callable, Iterator, Mapping

import flax.traverse_util
import numpy as np

from calm_jax.errors import UserError
from calm_jax.interop.published import LatentHeadConfig
from calm_jax.interop.weights import TensorInfo, Weights
from calm_jax.models.autoencoder import AutoencoderConfig
from calm_jax.models.transformer import TransformerConfig


@dataclasses.dataclass(frozen=True)
class Transform:
    """`read` turns one published tensor into a parameter (of one layer), and `write` is its inverse. Both return views."""

    read: Callable[[np.ndarray], np.ndarray]
    write: Callable[[np.ndarray], np.ndarray]


# The weight of a published Linear is [out, in], the transpose of a kernel here.
SAME = Transform(lambda x: x, lambda x: x)
LINEAR = Transform(lambda x: x.T, lambda x: x.T)


def heads_out(num_heads: int) -> Transform:
    """The query, key or value projection: [H*A, D] <-> [D, H, A]."""
    return Transform(
        lambda x: x.T.reshape(x.shape[1], num_heads, -1),
        lambda x: x.reshape(x.shape[0], -1).T,
    )


def heads_in(num_heads: int) -> Transform:
    """The attention's output projection: [D, H*A] <-> [H, A, D]."""
    return Transform(
        lambda x: x.T.reshape(num_heads, -1, x.shape[0]),
        lambda x: x.reshape(-1, x.shape[-1]).T,
    )


@dataclasses.dataclass(frozen=True)
class Row:
    """One parameter and its published tensors.

    Attributes:
      parameter: path of the parameter, such as `embed/norm/scale`.
      published: name of the published tensor, with `{i}` for the layer of a stacked parameter.
      transform: between one published tensor and the parameter (of one layer).
      num_layers: layers along the parameter's first axis; 0 if the parameter is not stacked.
      first_layer: published number of the first of these layers.
    """

    parameter: str
    published: str
    transform: Transform = SAME
    num_layers: int = 0
    first_layer: int = 0

    def published_names(self) -> list[str]:
        """The names of the parameter's tensors, in the order of their layers."""
        if not self.num_layers:
            return [self.published]
        layers = range(self.first_layer, self.first_layer + self.num_layers)
        return [self.published.format(i=layer) for layer in layers]


def _linear(parameter: str, published: str) -> Iterator[Row]:
    yield Row(f"{parameter}/kernel", f"{published}.weight", LINEAR)
    yield Row(f"{parameter}/bias", f"{published}.bias")


def _layer_norm(parameter: str, published: str) -> Iterator[Row]:
    yield Row(f"{parameter}/scale", f"{published}.weight")
    yield Row(f"{parameter}/bias", f"{published}.bias")


def _swiglu(parameter: str, published: str) -> Iterator[Row]:
    for name in ("gate", "up", "down"):
        yield Row(f"{parameter}/{name}/kernel", f"{published}.{name}_proj.weight", LINEAR)


def _stacked(rows: Iterator[Row], num_layers: int, first_layer: int = 0) -> Iterator[Row]:
    for row in rows:
        yield dataclasses.replace(row, num_layers=num_layers, first_layer=first_layer)


def autoencoder_rows(config: AutoencoderConfig) -> list[Row]:
    """The table of an autoencoder; `decoder.lm_head_weight`, an alias of the embedding, has no row."""

    def layers(parameter: str, published: str) -> Iterator[Row]:
        yield Row(f"{parameter}/norm/scale", f"{published}.{{i}}.layernorm.weight")
        yield from _swiglu(f"{parameter}/mlp", f"{published}.{{i}}.mlp")

    encoder_half, decoder_half = config.num_encoder_layers // 2, config.num_decoder_layers // 2
    encoder, decoder = "encoder.encoder_layers", "decoder.decoder_layers"
    return [
        Row("embed/embedding", "encoder.embed_tokens.weight"),
        *_stacked(layers("encoder_token_layers", encoder), encoder_half),
        *_linear("squeeze", "encoder.squeeze_layer"),
        *_stacked(layers("encoder_chunk_layers", encoder), encoder_half, encoder_half),
        Row("encoder_norm/scale", "encoder.norm.weight"),
        *_linear("to_posterior", "encoder.hidden_to_latent"),
        *_linear("from_latent", "decoder.latent_to_hidden"),
        *_stacked(layers("decoder_chunk_layers", decoder), decoder_half),
        *_linear("expand", "decoder.expand_layer"),
        *_stacked(layers("decoder_token_layers", decoder), decoder_half, decoder_half),
        Row("decoder_norm/scale", "decoder.norm.weight"),
    ]


def _transformer_rows(config: TransformerConfig, prefix: str) -> list[Row]:
    def layer() -> Iterator[Row]:
        parameter, published = "backbone/layers", f"{prefix}.layers.{{i}}"
        attention = f"{published}.self_attn"
        for name, letter, heads in (
            ("query", "q", config.num_heads),
            ("key", "k", config.num_kv_heads),
            ("value", "v", config.num_kv_heads),
        ):
            kernel = f"{parameter}/attention/{name}/kernel"
            yield Row(kernel, f"{attention}.{letter}_proj.weight", heads_out(heads))
        output = f"{parameter}/attention/output/kernel"
        yield Row(output, f"{attention}.o_proj.weight", heads_in(config.num_heads))
        yield from _swiglu(f"{parameter}/mlp", f"{published}.mlp")
        yield Row(f"{parameter}/attention_norm/scale", f"{published}.input_layernorm.weight")
        yield Row(f"{parameter}/mlp_norm/scale", f"{published}.post_attention_layernorm.weight")

    return [
        *_stacked(layer(), config.num_layers),
        Row("backbone/norm/scale", f"{prefix}.norm.weight"),
    ]


def backbone_rows(config: TransformerConfig) -> list[Row]:
    """The table of CALM's chunk embedding and transformer, which are the same for every latent head."""
    return [
        Row("embed/tokens/embedding", "transformer.embed_tokens.weight"),
        *_linear("embed/up", "embed_proj.0"),
        *_linear("embed/down", "embed_proj.2"),
        *_layer_norm("embed/norm", "embed_proj.3"),
        *_transformer_rows(config, "transformer"),
    ]


def autoregressive_rows(config: TransformerConfig, tied: bool) -> list[Row]:
    """The table of the autoregressive baseline, which is Hugging Face's Llama.

    Args:
      config: the transformer's config.
      tied: whether one published tensor is both embedding and output; they are always two parameters here.
    """
    embedding = "model.embed_tokens.weight"
    return [
        Row("embed/embedding", embedding),
        *_transformer_rows(config, "model"),
        Row("head/kernel", embedding if tied else "lm_head.weight", LINEAR),
    ]


def energy_head_rows(num_blocks: int) -> list[Row]:
    """The table of an energy head. The published file holds it twice, also under names that begin with `generative_head.`."""

    def block() -> Iterator[Row]:
        parameter, published = "head/blocks", "mlp_generator.mlp_blocks.{i}"
        yield from _layer_norm(f"{parameter}/norm", f"{published}.in_ln")
        yield Row(f"{parameter}/input_kernel", f"{published}.linears.0.weight", LINEAR)
        yield Row(f"{parameter}/input_bias", f"{published}.linears.0.bias")
        yield from _linear(f"{parameter}/hidden", f"{published}.linears.2")
        yield from _linear(f"{parameter}/gate_up", f"{published}.linears.4")
        yield from _linear(f"{parameter}/down", f"{published}.down_proj")

    return [
        *_linear("head/noise", "mlp_generator.noise_embd"),
        *_layer_norm("head/noise_norm", "mlp_generator.norm_noise"),
        *_linear("head/hidden", "mlp_generator.hidden_embd"),
        *_layer_norm("head/hidden_norm", "mlp_generator.norm_hidden"),
        *_stacked(block(), num_blocks),
        *_layer_norm("head/output_norm", "mlp_generator.final_layer.in_ln"),
        *_linear("head/output_hidden", "mlp_generator.final_layer.linears.0"),
        *_linear("head/output", "mlp_generator.final_layer.linears.2"),
    ]


def adaln_head_rows(num_blocks: int) -> list[Row]:
    """The table of a diffusion or flow head: both have the same network."""
    net, published = "head/net", "generative_head.net"

    def block() -> Iterator[Row]:
        parameter, name = f"{net}/blocks", f"{published}.res_blocks.{{i}}"
        yield from _layer_norm(f"{parameter}/norm", f"{name}.in_ln")
        yield from _linear(f"{parameter}/up", f"{name}.mlp.0")
        yield from _linear(f"{parameter}/down", f"{name}.mlp.2")
        yield from _linear(f"{parameter}/modulation", f"{name}.adaLN_modulation.1")

    return [
        *_linear(f"{net}/time_hidden", f"{published}.time_embed.mlp.0"),
        *_linear(f"{net}/time", f"{published}.time_embed.mlp.2"),
        *_linear(f"{net}/condition", f"{published}.cond_embed"),
        *_linear(f"{net}/input", f"{published}.input_proj"),
        *_stacked(block(), num_blocks),
        *_linear(f"{net}/modulation", f"{published}.final_layer.adaLN_modulation.1"),
        *_linear(f"{net}/output", f"{published}.final_layer.linear"),
    ]


def calm_rows(config: TransformerConfig, head: LatentHeadConfig) -> list[Row]:
    """The table of a CALM language model, without its autoencoder."""
    head_rows = energy_head_rows if head.name == "energy" else adaln_head_rows
    return [*backbone_rows(config), *head_rows(head.num_blocks)]


def prefixed(rows: list[Row], prefix: str) -> list[Row]:
    """The table of a model that is a submodule of another published model."""
    return [dataclasses.replace(row, published=prefix + row.published) for row in rows]


# Prefix of the tensors of an autoencoder inside a language model's checkpoint.
AUTOENCODER_PREFIX = "ae_model."
# The published code has two names for some tensors, and saves them under both or under one. Tables have the first name.
_ALIASES = (
    ("mlp_generator.", "generative_head."),
    ("encoder.embed_tokens.weight", "decoder.lm_head_weight"),
)


def alias(name: str) -> str | None:
    """The other name of a published tensor, or None if it has only one."""
    for pair in _ALIASES:
        for one, other in (pair, pair[::-1]):
            if one in name:
                return name.replace(one, other)
    return None


def with_aliases(tensors: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Published tensors under all their names.

    Only first names have a second one: the diffusion and flow heads have the second name of the energy head's tensors alone.
    """
    second = {
        name.replace(one, other): tensor
        for name, tensor in tensors.items()
        for one, other in _ALIASES
        if one in name
    }
    return {**tensors, **second}


def find(rows: list[Row], tensors: Mapping[str, TensorInfo], like: Mapping) -> list[Row]:
    """Looks up a table's tensors in a checkpoint and checks their shapes.

    Args:
      rows: the table.
      tensors: the checkpoint's tensors.
      like: nested dict of the parameters' shapes.

    Returns:
      The table, with the aliases under which the checkpoint has its tensors.

    Raises:
      UserError: if a tensor is missing or has another shape, or a parameter has no row.
    """
    shapes = flax.traverse_util.flatten_dict(like, sep="/")
    # A damaged config.json can ask for billions of layers, and their names would fill the memory.
    for row in rows:
        if row.num_layers > len(tensors):
            raise UserError(
                f"config.json asks for {row.num_layers} layers of {row.published}; the checkpoint has {len(tensors)} tensors"
            )
    found = [_with_saved_name(row, tensors) for row in rows]
    for row in found:
        shape = shapes.pop(row.parameter).shape
        expected = _published_shape(row, shape)
        for name in row.published_names():
            if name not in tensors:
                raise UserError(f"the checkpoint has no tensor {name}")
            if tensors[name].shape != expected:
                raise UserError(
                    f"the checkpoint's {name} has shape {tensors[name].shape}; its config.json asks for {expected}"
                )
    if shapes:
        raise UserError(f"no published tensor fills the parameter {min(shapes)}")
    return found


def _with_saved_name(row: Row, tensors: Mapping[str, TensorInfo]) -> Row:
    """The row under its alias, if the checkpoint has only that name."""
    other = alias(row.published)
    if other is None or row.published_names()[0] in tensors:
        return row
    renamed = dataclasses.replace(row, published=other)
    return renamed if renamed.published_names()[0] in tensors else row


def _published_shape(row: Row, shape: tuple[int, ...]) -> tuple[int, ...]:
    """The shape of each published tensor of a parameter that has shape `shape`."""
    one = shape[1:] if row.num_layers else shape
    # An array of this shape that takes no memory: all its elements are one zero.
    return row.transform.write(np.broadcast_to(np.float32(0), one)).shape


def read_parameter(row: Row, weights: Weights) -> np.ndarray:
    """One parameter, contiguous float32. Layers are read one after the other, to save memory."""
    if not row.num_layers:
        return np.ascontiguousarray(row.transform.read(weights.read(row.published)))
    first, *others = row.published_names()
    layer = row.transform.read(weights.read(first))
    value = np.empty((row.num_layers, *layer.shape), np.float32)
    value[0] = layer
    for index, name in enumerate(others, 1):
        value[index] = row.transform.read(weights.read(name))
    return value


def read_parameters(rows: list[Row], weights: Weights, like: Mapping) -> dict:
    """All parameters as a nested dict of float32 arrays.

    Args:
      rows: the table.
      weights: the checkpoint.
      like: nested dict of the parameters' shapes.

    Raises:
      UserError: if a tensor is missing, has another shape or cannot be read, or a parameter has no row.
    """
    found = find(rows, weights.tensors, like)
    flat = {row.parameter: read_parameter(row, weights) for row in found}
    return flax.traverse_util.unflatten_dict(flat, sep="/")


def write_parameter(row: Row, value: np.ndarray) -> Iterator[tuple[str, np.ndarray]]:
    """The published name and tensor of each layer of a parameter or a gradient, as views."""
    layers = value if row.num_layers else [value]
    for name, layer in zip(row.published_names(), layers, strict=True):
        yield name, row.transform.write(layer)


def write_parameters(rows: list[Row], params: Mapping) -> dict[str, np.ndarray]:
    """The published tensors of a nested dict of parameters or gradients, by name, as views."""
    flat = flax.traverse_util.flatten_dict(params, sep="/")
    return {
        name: tensor
        for row in rows
        for name, tensor in write_parameter(row, np.asarray(flat[row.parameter]))
    }
