"""What files of golden cases hold under names of their own: the recorded gradients, and the cases in temperature.npz.

The code that compares lists these names, because a file that lacks some of its arrays does not show that they are missing.
"""

# The published names of the parameters whose gradients are recorded, by kind of case. Every kind of tensor is among them; files with
# the gradients of all parameters would be several times as large.
AUTOENCODER_GRADIENTS = (
    "encoder.embed_tokens.weight",
    "encoder.encoder_layers.0.mlp.down_proj.weight",
    "encoder.squeeze_layer.bias",
    "encoder.hidden_to_latent.weight",
    "decoder.decoder_layers.0.layernorm.weight",
    "decoder.expand_layer.bias",
)
ENERGY_GRADIENTS = (
    "transformer.embed_tokens.weight",
    "transformer.layers.0.input_layernorm.weight",
    "transformer.layers.0.self_attn.q_proj.weight",
    "transformer.layers.0.self_attn.k_proj.weight",
    "transformer.layers.0.mlp.down_proj.weight",
    "transformer.norm.weight",
    "embed_proj.0.bias",
    "embed_proj.2.weight",
    "embed_proj.3.weight",
    "mlp_generator.noise_embd.weight",
    "mlp_generator.norm_noise.weight",
    "mlp_generator.hidden_embd.bias",
    "mlp_generator.mlp_blocks.0.linears.4.bias",
    "mlp_generator.mlp_blocks.0.down_proj.weight",
    "mlp_generator.final_layer.in_ln.bias",
    "mlp_generator.final_layer.linears.2.weight",
)
AUTOREGRESSIVE_GRADIENTS = (
    "model.embed_tokens.weight",
    "model.layers.0.self_attn.q_proj.weight",
    "model.norm.weight",
    "lm_head.weight",
)
DIFFUSION_HEAD_GRADIENTS = (
    "generative_head.net.input_proj.weight",
    "generative_head.net.time_embed.mlp.0.bias",
    "generative_head.net.cond_embed.weight",
    "generative_head.net.res_blocks.0.adaLN_modulation.1.weight",
    "generative_head.net.res_blocks.0.in_ln.weight",
    "generative_head.net.final_layer.linear.weight",
    "generative_head.net.final_layer.adaLN_modulation.1.bias",
)
FLOW_HEAD_GRADIENTS = (
    "generative_head.net.input_proj.bias",
    "generative_head.net.cond_embed.weight",
    "generative_head.net.res_blocks.0.mlp.0.weight",
    "generative_head.net.final_layer.linear.bias",
)
# Of the whole diffusion and flow models.
MODEL_GRADIENTS = (
    "transformer.layers.0.self_attn.v_proj.weight",
    "transformer.norm.weight",
    "embed_proj.2.bias",
    "generative_head.net.cond_embed.bias",
)

TEMPERATURE_CASES = (
    "n2_plain",
    "n2_single",
    "n3_all_unique",
    "n3_plain",
    "n4_fallback_to_3",
    "n5_fallback_to_2",
)
