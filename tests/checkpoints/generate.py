"""Generates the tiny checkpoints and the results of transformers, torch and peft on them. See README.md in this folder.

python generate.py [OUT]      write all checkpoints (default: this folder), print a table
"""

import argparse
import json
import shutil
import sys
import unittest.mock
from pathlib import Path

import peft
import torch
import transformers
from peft import LoraConfig, get_peft_model
from safetensors.torch import load_file, save_file

HERE = Path(__file__).parent
# One optimizer step. The epsilon is large, so that the step depends on the size of a gradient and not on its sign alone.
ADAMW = {"lr": 0.01, "beta1": 0.9, "beta2": 0.95, "eps": 0.001, "weight_decay": 0.1, "max_grad_norm": 0.5}
SHAPE = {"hidden_size": 32, "intermediate_size": 40, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2}
# Wavelengths are 2 pi 10000^(2i/16): 6 stays, 20 and 63 are interpolated, 199 and longer are stretched.
LLAMA3 = {"rope_type": "llama3", "rope_theta": 10000.0, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
          "original_max_position_embeddings": 64}

# Smaller, for models with more layers.
SMALL = {"vocab_size": 64, "intermediate_size": 24, "pad_token_id": 0, "max_position_embeddings": 256}
# Of the four pairs of a head of 8 columns, the first keeps its frequency, the second is interpolated, the others are stretched.
YARN = {"rope_type": "yarn", "rope_theta": 100.0, "factor": 4.0, "original_max_position_embeddings": 16, "beta_fast": 2.0,
        "beta_slow": 0.5}

# Half of the eight columns of a head are rotated. Every key head serves two value heads, and queries are narrower than values.
DELTA_NET = SMALL | {"head_dim": 8, "linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 4,
                     "linear_value_head_dim": 6, "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0,
                                                                     "partial_rotary_factor": 0.5, "mrope_section": [1, 1, 0],
                                                                     "mrope_interleaved": True}}
MOE = SMALL | {"head_dim": 8, "moe_intermediate_size": 12}

# name: (family, configuration, dtype, layout of config.json, lengths of the sequences, tensors per shard)
CHECKPOINTS = {
    "qwen2": ("qwen2", {"vocab_size": 256, "tie_word_embeddings": True, "max_position_embeddings": 32768}, "float32", 4,
              [24, 17, 9], None),
    "qwen2_5_sharded": ("qwen2", {"vocab_size": 192, "tie_word_embeddings": False, "rope_theta": 1000000.0, "max_window_layers": 2,
                                  "max_position_embeddings": 32768}, "float32", 5, [20, 6], 12),
    "qwen3": ("qwen3", {"vocab_size": 256, "hidden_size": 48, "head_dim": 16, "tie_word_embeddings": True,
                        "rope_theta": 1000000.0, "max_position_embeddings": 40960}, "float32", 5, [24, 24, 1, 13], None),
    "llama3": ("llama", {"vocab_size": 224, "hidden_size": 40, "head_dim": 16, "tie_word_embeddings": False, "rms_norm_eps": 1e-5,
                         "rope_parameters": LLAMA3, "max_position_embeddings": 131072}, "float32", 5, [80, 33], None),
    "llama3_bf16": ("llama", {"vocab_size": 224, "hidden_size": 64, "num_hidden_layers": 1, "tie_word_embeddings": True,
                              "rms_norm_eps": 1e-5, "rope_parameters": LLAMA3, "max_position_embeddings": 131072},
                    "bfloat16", 4, [70, 12], None),
    "qwen3_f16": ("qwen3", {"vocab_size": 200, "head_dim": 12, "num_hidden_layers": 3, "tie_word_embeddings": False,
                            "max_position_embeddings": 40960}, "float16", 4, [18, 11], None),
    # The padding token occurs in the sequences, and its embedding has no gradient.
    "qwen2_pad": ("qwen2", {"vocab_size": 40, "pad_token_id": 7, "tie_word_embeddings": True, "max_position_embeddings": 32768},
                  "float32", 5, [24, 17], None),
    # The second layer has a window.
    "qwen2_window": ("qwen2", SMALL | {"use_sliding_window": True, "sliding_window": 4, "max_window_layers": 1}, "float32", 5,
                     [13, 3], None),
    "qwen2_yarn": ("qwen2", SMALL | {"num_hidden_layers": 1, "rope_parameters": YARN}, "float32", 4, [24, 9], None),
    "llama_linear": ("llama", SMALL | {"num_hidden_layers": 1, "rope_parameters": {
        "rope_type": "linear", "rope_theta": 10000.0, "factor": 3.0}}, "float32", 5, [20, 7], None),
    # Sequences of at most `max_position_embeddings` tokens, whose frequencies dynamic scaling does not change.
    "llama_dynamic": ("llama", SMALL | {"num_hidden_layers": 1, "max_position_embeddings": 64, "rope_parameters": {
        "rope_type": "dynamic", "rope_theta": 10000.0, "factor": 3.0}}, "float32", 5, [20, 33], None),
    "mistral": ("mistral", SMALL | {"sliding_window": 8, "head_dim": 12}, "float32", 5, [24, 6], None),
    "ministral3": ("ministral3", SMALL | {"head_dim": 8, "rope_parameters": YARN | {
        "mscale": 1.0, "mscale_all_dim": 1.0, "llama_4_scaling_beta": 0.5}}, "float32", 5, [40, 12], None),
    # Four layers repeat, and the fifth is the first of an incomplete period; the fourth has no rotary embedding.
    "smollm3": ("smollm3", SMALL | {"num_hidden_layers": 5, "no_rope_layer_interval": 4}, "float32", 5, [22, 9], None),
    "olmo2": ("olmo2", SMALL, "float32", 5, [24, 11], None),
    "olmo3": ("olmo3", SMALL | {"num_hidden_layers": 4, "sliding_window": 6, "rope_parameters": {
        "full_attention": YARN, "sliding_attention": {"rope_type": "default", "rope_theta": 100.0}}}, "float32", 5,
        [30, 5], None),
    "granite": ("granite", SMALL | {"tie_word_embeddings": True, "embedding_multiplier": 3.0, "residual_multiplier": 0.6,
                                    "attention_multiplier": 0.2, "logits_scaling": 1.5}, "float32", 5, [24, 9], None),
    # Half of the eight columns of a head are rotated.
    "phi3": ("phi3", SMALL | {"original_max_position_embeddings": 128, "rope_parameters": {
        "rope_type": "longrope", "rope_theta": 10000.0, "partial_rotary_factor": 0.5, "short_factor": [1.5, 2.0],
        "long_factor": [4.0, 9.0], "original_max_position_embeddings": 128}}, "float32", 4, [40, 17], None),
    # Three layers repeat, and the last is the first of an incomplete period; windows of 5, two thetas, scaled full layers.
    "gemma3": ("gemma3", SMALL | {"num_hidden_layers": 7, "head_dim": 8, "sliding_window": 5, "query_pre_attn_scalar": 12,
                                  "layer_types": ["sliding_attention", "sliding_attention", "full_attention"] * 2
                                  + ["sliding_attention"],
                                  "rope_parameters": {
                                      "full_attention": {"rope_type": "linear", "rope_theta": 1000000.0, "factor": 8.0},
                                      "sliding_attention": {"rope_type": "default", "rope_theta": 10000.0}}},
               "float32", 5, [24, 4], None),
    "qwen3_moe": ("qwen3_moe", MOE | {"num_experts": 5, "num_experts_per_tok": 2, "norm_topk_prob": True}, "float32", 5,
                  [24, 11], None),
    # Every expert gets every token; the experts of a layer are one tensor in the file.
    "qwen3_moe_fused": ("qwen3_moe", MOE | {"num_experts": 3, "num_experts_per_tok": 3, "norm_topk_prob": False,
                                            "tie_word_embeddings": True}, "float32", 5, [17, 6], None),
    "qwen3_moe_one": ("qwen3_moe", MOE | {"num_experts": 1, "num_experts_per_tok": 1, "norm_topk_prob": True,
                                          "num_hidden_layers": 1}, "float32", 4, [12, 5], None),
    # All tokens go to the same expert of a layer.
    "qwen3_moe_idle": ("qwen3_moe", MOE | {"num_experts": 4, "num_experts_per_tok": 1, "norm_topk_prob": False}, "float32", 5,
                       [15, 8], None),
    # Many gates and ups are beyond the limit, and the bounds of YaRN are not whole numbers.
    "gpt_oss": ("gpt_oss", SMALL | {"num_hidden_layers": 3, "head_dim": 8, "num_local_experts": 4, "num_experts_per_tok": 2,
                                    "sliding_window": 5, "swiglu_limit": 0.6, "rope_parameters": YARN | {"truncate": False}},
                "float32", 5, [24, 3], None),
    # Experts in MXFP4, which transformers dequantises.
    "gpt_oss_mxfp4": ("gpt_oss", SMALL | {"intermediate_size": 32, "head_dim": 8, "num_local_experts": 3, "num_experts_per_tok": 2,
                                          "sliding_window": 128, "rope_parameters": YARN | {"truncate": False}},
                      "bfloat16", 5, [12, 7], None),
    # Three layers repeat, and the last two are an incomplete period. Layers with full attention have wider heads, one key head, values that
    # are keys, and rotate half of the pairs of columns.
    "gemma4": ("gemma4", SMALL | {"num_hidden_layers": 8, "head_dim": 8, "sliding_window": 5, "attention_k_eq_v": True,
                                  "global_head_dim": 12, "num_global_key_value_heads": 1, "hidden_size_per_layer_input": 0,
                                  "final_logit_softcapping": 3.0,
                                  "layer_types": ["sliding_attention", "full_attention", "full_attention"] * 2
                                  + ["sliding_attention", "full_attention"],
                                  "rope_parameters": {
                                      "full_attention": {"rope_type": "proportional", "rope_theta": 1000000.0,
                                                         "partial_rotary_factor": 0.5},
                                      "sliding_attention": {"rope_type": "default", "rope_theta": 10000.0}}},
               "float32", 5, [26, 9], None),
    # Three layers with a Gated DeltaNet, then one with attention, and one more; sequences of more than one and of exactly one chunk of 64
    # tokens, and of one token.
    "qwen3_5": ("qwen3_5", DELTA_NET | {"num_hidden_layers": 5}, "float32", 5, [70, 64, 1, 9], None),
    "qwen3_bias": ("qwen3", SMALL | {"head_dim": 6, "num_hidden_layers": 1, "attention_bias": True}, "float32", 5, [14, 5], None),
    # Every other layer has experts.
    "qwen3_moe_sparse_step": ("qwen3_moe", MOE | {"num_experts": 4, "num_experts_per_tok": 2, "norm_topk_prob": True,
                                                  "num_hidden_layers": 5, "decoder_sparse_step": 2}, "float32", 5, [24, 11], None),
    # The first layer has one MLP, and the shared expert another width than it and than the experts. The first and the third layer have a window.
    "qwen2_moe": ("qwen2_moe", SMALL | {"moe_intermediate_size": 12, "shared_expert_intermediate_size": 20, "num_experts": 5,
                                        "num_experts_per_tok": 2, "num_hidden_layers": 3, "mlp_only_layers": [0],
                                        "use_sliding_window": True, "sliding_window": 7}, "float32", 5, [24, 11], None),
    # The experts of a layer are one tensor in the file.
    "qwen2_moe_fused": ("qwen2_moe", SMALL | {"moe_intermediate_size": 12, "shared_expert_intermediate_size": 8, "num_experts": 4,
                                              "num_experts_per_tok": 3, "norm_topk_prob": True, "qkv_bias": False,
                                              "tie_word_embeddings": True}, "float32", 4, [17, 6], None),
    # Two first layers without experts, two of three groups of experts, and half of the eight columns of a head rotated.
    "glm4_moe": ("glm4_moe", SMALL | {"head_dim": 8, "moe_intermediate_size": 12, "n_routed_experts": 6, "num_experts_per_tok": 3,
                                      "n_group": 3, "topk_group": 2, "n_shared_experts": 2, "routed_scaling_factor": 1.7,
                                      "num_hidden_layers": 4, "first_k_dense_replace": 2, "use_qk_norm": True,
                                      "attention_bias": True}, "float32", 5, [40, 17], None),
    # Neither norms of heads nor biases; scores that are not normalised.
    "glm4_moe_fused": ("glm4_moe", SMALL | {"moe_intermediate_size": 12, "n_routed_experts": 4, "num_experts_per_tok": 2,
                                            "norm_topk_prob": False, "first_k_dense_replace": 0, "tie_word_embeddings": True},
                       "float32", 4, [17, 6], None),
}
# The checkpoints with expected values of their routers.
ROUTERS = ["qwen3_moe", "qwen3_moe_fused", "qwen3_moe_one", "qwen3_moe_idle", "gpt_oss", "qwen3_moe_sparse_step", "qwen2_moe"]
# Models of images and text: the configuration of the decoder, the rest of config.json, the layout of config.json, and of the names.
# Names are those of transformers' modules, or those that it writes to files. The towers are as small as the classes allow.
IMAGES = {"image_token_id": 60, "video_token_id": 61, "vision_start_token_id": 62, "vision_end_token_id": 63}
SIGLIP = {"hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2, "image_size": 28, "patch_size": 14,
          "vision_use_head": False, "model_type": "siglip_vision_model"}
PIXTRAL = {"hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2, "image_size": 28, "patch_size": 14,
           "head_dim": 4, "model_type": "pixtral"}
QWEN_TOWER = {"depth": 1, "hidden_size": 16, "intermediate_size": 16, "num_heads": 2, "out_hidden_size": 32}
GEMMA4_TOWER = {"hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2, "num_key_value_heads": 2,
                "head_dim": 4, "patch_size": 2, "position_embedding_size": 4}
WRAPPERS = {
    # Sizes of the class's defaults are missing in the file, as in that of 4B.
    "gemma3_vision": ("gemma3", SMALL | {
        "num_hidden_layers": 3, "head_dim": 8, "sliding_window": 5, "query_pre_attn_scalar": 12, "num_attention_heads": 8,
        "num_key_value_heads": 4, "layer_types": ["sliding_attention", "sliding_attention", "full_attention"],
        "rope_parameters": {"full_attention": {"rope_type": "linear", "rope_theta": 1000000.0, "factor": 8.0},
                            "sliding_attention": {"rope_type": "default", "rope_theta": 10000.0}}},
        {"vision_config": SIGLIP, "mm_tokens_per_image": 4, "image_token_index": 60, "boi_token_index": 61, "eoi_token_index": 62},
        "defaults", "files", [24, 4]),
    # The fields of the decoder are those of the outermost object, as in files of transformers 4.49.
    "qwen2_5_vl": ("qwen2_5_vl", SMALL | {"pad_token_id": None, "rope_parameters": {
        "rope_type": "default", "rope_theta": 1000000.0, "mrope_section": [1, 1, 2]}},
        IMAGES | {"vision_config": QWEN_TOWER | {"fullatt_block_indexes": [0]}}, "flat", "files", [20, 7]),
    "qwen3_vl": ("qwen3_vl", SMALL | {"head_dim": 8, "pad_token_id": None, "rope_parameters": {
        "rope_type": "default", "rope_theta": 5000000.0, "mrope_section": [2, 1, 1], "mrope_interleaved": True}},
        IMAGES | {"vision_config": QWEN_TOWER | {"num_position_embeddings": 4, "deepstack_visual_indexes": [0]},
                  "tie_word_embeddings": True}, 5, "files", [20, 7]),
    # A head that is not tied, although no field says so, as in Mistral Small 3.1.
    "mistral3": ("mistral3", SMALL | {"model_type": "mistral", "head_dim": 12, "sliding_window": None},
                 {"vision_config": PIXTRAL, "tie_word_embeddings": False}, "untied", "files", [24, 6]),
    "ministral3_vision": ("mistral3", SMALL | {"model_type": "ministral3", "head_dim": 8, "rope_parameters": YARN | {
        "mscale": 1.0, "mscale_all_dim": 1.0, "llama_4_scaling_beta": 0.5}},
        {"vision_config": PIXTRAL, "tie_word_embeddings": True}, 5, "modules", [40, 12]),
    # The fields of layers with full attention as files on the Hub have them.
    "gemma4_vision": ("gemma4", SMALL | {
        "num_hidden_layers": 3, "head_dim": 8, "global_head_dim": 12, "sliding_window": 5, "hidden_size_per_layer_input": 0,
        "layer_types": ["sliding_attention", "sliding_attention", "full_attention"]},
        {"vision_config": GEMMA4_TOWER, "audio_config": None, "image_token_id": 60, "boi_token_id": 61, "eoi_token_id": 62,
         "video_token_id": 63}, "hub", "files", [24, 4]),
    # The fraction of rotated columns is that of the class, 0.25.
    "qwen3_5_vision": ("qwen3_5", DELTA_NET | {"num_hidden_layers": 2, "pad_token_id": None, "layer_types": [
        "linear_attention", "full_attention"], "rope_parameters": {
        "rope_type": "default", "rope_theta": 10000000.0, "mrope_section": [1, 0, 0], "mrope_interleaved": True}},
        IMAGES | {"vision_config": QWEN_TOWER | {"num_position_embeddings": 4}, "tie_word_embeddings": True}, 5, "files", [20, 7]),
}
WRAPPER_CLASSES = {
    "gemma3": (transformers.Gemma3Config, transformers.Gemma3ForConditionalGeneration),
    "gemma4": (transformers.Gemma4Config, transformers.Gemma4ForConditionalGeneration),
    "qwen2_5_vl": (transformers.Qwen2_5_VLConfig, transformers.Qwen2_5_VLForConditionalGeneration),
    "qwen3_vl": (transformers.Qwen3VLConfig, transformers.Qwen3VLForConditionalGeneration),
    "qwen3_5": (transformers.Qwen3_5Config, transformers.Qwen3_5ForConditionalGeneration),
    "mistral3": (transformers.Mistral3Config, transformers.Mistral3ForConditionalGeneration),
}
CLASSES = {
    "qwen2": (transformers.Qwen2Config, transformers.Qwen2ForCausalLM),
    "qwen3": (transformers.Qwen3Config, transformers.Qwen3ForCausalLM),
    "llama": (transformers.LlamaConfig, transformers.LlamaForCausalLM),
    "mistral": (transformers.MistralConfig, transformers.MistralForCausalLM),
    "ministral3": (transformers.Ministral3Config, transformers.Ministral3ForCausalLM),
    "smollm3": (transformers.SmolLM3Config, transformers.SmolLM3ForCausalLM),
    "olmo2": (transformers.Olmo2Config, transformers.Olmo2ForCausalLM),
    "olmo3": (transformers.Olmo3Config, transformers.Olmo3ForCausalLM),
    "granite": (transformers.GraniteConfig, transformers.GraniteForCausalLM),
    "phi3": (transformers.Phi3Config, transformers.Phi3ForCausalLM),
    "gemma3": (transformers.Gemma3TextConfig, transformers.Gemma3ForCausalLM),
    "gemma4": (transformers.Gemma4TextConfig, transformers.Gemma4ForCausalLM),
    "glm4_moe": (transformers.Glm4MoeConfig, transformers.Glm4MoeForCausalLM),
    "qwen2_moe": (transformers.Qwen2MoeConfig, transformers.Qwen2MoeForCausalLM),
    "qwen3_moe": (transformers.Qwen3MoeConfig, transformers.Qwen3MoeForCausalLM),
    "qwen3_5": (transformers.Qwen3_5TextConfig, transformers.Qwen3_5ForCausalLM),
    "gpt_oss": (transformers.GptOssConfig, transformers.GptOssForCausalLM),
}
# The base checkpoints of the adapters, and their targets. The towers of models of images and text have modules of these names, too.
LORA = {
    "gemma3_vision": r"model\.language_model\..*\.(q_proj|v_proj|down_proj)",
    "qwen3_vl": r"model\.language_model\..*\.(k_proj|o_proj|gate_proj)",
    "llama3": ["q_proj", "v_proj", "o_proj", "gate_proj", "down_proj", "lm_head"],
    "phi3": ["qkv_proj", "o_proj", "gate_up_proj", "down_proj"],
    "gemma3": ["q_proj", "k_proj", "o_proj", "up_proj", "down_proj"],
    "qwen3_moe": ["q_proj", "v_proj", "o_proj"],
    "gemma4": ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "down_proj"],
    "qwen3_5": ["in_proj_qkv", "in_proj_z", "in_proj_a", "out_proj", "q_proj", "o_proj", "down_proj"],
    "gpt_oss": ["k_proj", "o_proj", "lm_head"],
    "qwen2_moe": ["q_proj", "gate_proj", "down_proj", "shared_expert_gate"],
}
# Adapters of the parameters of experts.
EXPERTS_LORA = {
    "qwen3_moe": {"target_modules": ["q_proj"], "target_parameters": ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]},
    "qwen3_moe_fused": {"target_modules": [], "target_parameters": ["mlp.experts.down_proj"]},
    "gpt_oss": {"target_modules": ["o_proj"], "target_parameters": ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]},
}
# Families with norms whose weights are around 0.
CENTRED = {"gemma3", "qwen3_5"}
# The 4-bit floats of MXFP4 without their sign.
FP4 = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0])


def published(tensors):
    """Returns the tensors as transformers saves them: the matrices of each expert of Qwen3-MoE apart."""
    result = {}
    for name, tensor in tensors.items():
        prefix, dot, part = name.rpartition(".mlp.experts.")
        # gpt-oss has biases, and saves experts as they are.
        if not dot or f"{name}_bias" in tensors or part.endswith("_bias"):
            result[name] = tensor
            continue
        for expert, matrix in enumerate(tensor):
            parts = ["gate_proj", "up_proj"] if part == "gate_up_proj" else ["down_proj"]
            for kind, of_kind in zip(parts, matrix.chunk(len(parts))):
                result[f"{prefix}{dot}{expert}.{kind}.weight"] = of_kind.contiguous()
    return result


def to_mxfp4(tensors):
    """Returns the tensors with matrices of experts in MXFP4: two numbers per byte, and an exponent for each 32 inputs."""
    result = {}
    for name, tensor in tensors.items():
        if not name.endswith(("experts.gate_up_proj", "experts.down_proj")):
            result[name] = tensor
            continue
        groups = tensor.float().transpose(1, 2).unflatten(-1, (-1, 32))
        exponents = groups.abs().amax(-1).log2().floor().int() - 2
        scaled = groups / torch.exp2(exponents.float())[..., None]
        codes = (scaled.abs()[..., None] - FP4).abs().argmin(-1) + 8 * (scaled < 0)
        result[f"{name}_blocks"] = (codes[..., ::2] + 16 * codes[..., 1::2]).to(torch.uint8).contiguous()
        result[f"{name}_scales"] = (exponents + 127).to(torch.uint8)
    return result


def random_model(family, config, seed):
    """Returns a model whose matrices, biases and norms all differ from their initial values."""
    torch.manual_seed(seed)
    config_class, model_class = CLASSES[family]
    return randomised(model_class(config_class(**(SHAPE | config), bos_token_id=1, eos_token_id=2, attn_implementation="eager")), family)


def weights(model):
    """Returns the parameters, and the buffers of files, which are never trained, by name."""
    return dict(model.named_parameters()) | factors(model)


def factors(model):
    return {name: buffer for name, buffer in model.named_buffers() if name.endswith(("layer_scalar", "e_score_correction_bias"))}


def randomised(model, family):
    with torch.no_grad():
        for index, factor in enumerate(factors(model).values()):
            # Other buffers are biases of routers, which change the choice of experts.
            if factor.numel() == 1:
                factor.fill_([0.7, 1.2, 0.9][index % 3])
            else:
                factor.copy_(0.05 * torch.randn_like(factor))
        for name, parameter in model.named_parameters():
            noise = torch.randn_like(parameter)
            if family == "gemma4" and name.endswith(("q_norm.weight", "k_norm.weight")):
                # Scores are not scaled, so these norms keep attention from choosing one token.
                parameter.copy_(0.5 + 0.1 * noise)
            elif name.endswith("norm.weight") and "vision" not in name:
                parameter.copy_((0.0 if family in CENTRED and "linear_attn" not in name else 1.0) + 0.2 * noise)
            elif name.endswith("A_log"):
                # Slow decays: transformers takes differences of sums of their logarithms in f32, whose errors grow with the sums.
                parameter.copy_(0.5 * noise - 3.0)
            elif name.endswith("conv1d.weight"):
                parameter.copy_(0.5 * noise)
            elif name.endswith("bias"):
                parameter.copy_(0.3 * noise)
            elif family == "qwen3_5":
                # Normalised outputs of recurrent layers amplify the rounding errors of larger matrices beyond the tests' tolerance.
                parameter.copy_((0.6 if "embed_tokens" in name else 0.1) * noise)
            else:
                parameter.copy_(0.2 * noise)
        if getattr(model.config, "num_experts_per_tok", None) == 1 and model.config.num_experts > 1:
            # The first column of hidden states is large and above 0, and one expert's logit grows with it.
            model.model.embed_tokens.weight[:, 0] = 4.0
            for layer in model.model.layers:
                layer.post_attention_layernorm.weight[0] = 1.0
                layer.mlp.gate.weight[2, 0] = 0.8
    return model.eval()


def layout_4(config, dtype):
    """Returns the configuration in the format of transformers 4."""
    config = dict(config)
    rope = dict(config.pop("rope_parameters"))
    config.pop("dtype", None)
    config["torch_dtype"] = dtype
    config["transformers_version"] = "4.51.0"
    config["rope_theta"] = rope.pop("rope_theta")
    if "partial_rotary_factor" in rope:
        config["partial_rotary_factor"] = rope.pop("partial_rotary_factor")
    config["rope_scaling"] = rope if rope["rope_type"] != "default" else None
    config.pop("layer_types", None)
    return config


def save_model(model, folder, dtype, layout, per_shard):
    """Writes config.json and the weights in `dtype`; returns the written weights as f32."""
    config = json.loads(model.config.to_json_string())
    config["architectures"] = [type(model).__name__]
    config["dtype"] = dtype
    config = layout_4(config, dtype) if layout == 4 else config
    (folder / "config.json").write_text(json.dumps(config, indent=2, sort_keys=True) + "\n")
    tensors = {name: parameter.detach().to(getattr(torch, dtype)).contiguous() for name, parameter in weights(model).items()}
    if folder.name.endswith("mxfp4"):
        config["quantization_config"] = {"quant_method": "mxfp4", "modules_to_not_convert": [
            "model.layers.*.self_attn", "model.layers.*.mlp.router", "model.embed_tokens", "lm_head"]}
        (folder / "config.json").write_text(json.dumps(config, indent=2, sort_keys=True) + "\n")
        tensors = to_mxfp4(tensors)
    elif not folder.name.endswith("fused"):
        tensors = published(tensors)
    names = sorted(tensors)
    if per_shard is None:
        save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    else:
        shards = [names[i : i + per_shard] for i in range(0, len(names), per_shard)]
        of = {}
        for i, shard in enumerate(shards):
            file = f"model-{i + 1:05}-of-{len(shards):05}.safetensors"
            save_file({name: tensors[name] for name in shard}, folder / file, {"format": "pt"})
            of |= dict.fromkeys(shard, file)
        total = sum(tensor.numel() * tensor.element_size() for tensor in tensors.values())
        index = {"metadata": {"total_size": total}, "weight_map": of}
        (folder / "model.safetensors.index.json").write_text(json.dumps(index, indent=2, sort_keys=True) + "\n")
    return {name: tensor.float() for name, tensor in tensors.items()}


def tokens(lengths, vocab, seed):
    """Returns ids and mask [B, T], right-padded with token 0."""
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(3, vocab, (len(lengths), max(lengths)), generator=generator)
    mask = (torch.arange(max(lengths))[None] < torch.tensor(lengths)[:, None]).long()
    return ids * mask, mask


def evaluate(model, ids, mask):
    """Returns logits [B, T, V] and the mean cross-entropy of the targets whose mask is 1."""
    logits = model(input_ids=ids, attention_mask=mask).logits
    counted = mask[:, 1:].bool()
    return logits, torch.nn.functional.cross_entropy(logits[:, :-1][counted], ids[:, 1:][counted])


def document(ids, mask, logits, loss, gradients):
    """Returns the tensors of a `grpo-model/1` file."""
    return {
        "ids": ids,
        "mask": mask.to(torch.uint8),
        "expected.loss": loss.detach().reshape(()),
        "expected.logits": (logits.detach() * mask[..., None]).contiguous(),
    } | {f"expected.grad.{name}": gradient.contiguous() for name, gradient in gradients.items()}


def source():
    return f"torch {torch.__version__}, transformers {transformers.__version__}"


def optimizer_step(model):
    """Makes one step of torch's AdamW with the current gradients: the global norm is clipped, vectors do not decay."""
    decayed = [p for p in model.parameters() if p.ndim > 1]
    others = [p for p in model.parameters() if p.ndim <= 1]
    groups = [{"params": decayed, "weight_decay": ADAMW["weight_decay"]}, {"params": others, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=ADAMW["lr"], betas=(ADAMW["beta1"], ADAMW["beta2"]), eps=ADAMW["eps"])
    norm = torch.nn.utils.clip_grad_norm_(model.parameters(), ADAMW["max_grad_norm"])
    assert norm > 2 * ADAMW["max_grad_norm"], "the gradient is not clipped"
    optimizer.step()
    return published({name: parameter.detach().contiguous() for name, parameter in model.named_parameters()})


def make(out, name, seed):
    family, config, dtype, layout, lengths, per_shard = CHECKPOINTS[name]
    folder = out / name
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    model = random_model(family, config, seed)
    stored = save_model(model, folder, dtype, layout, per_shard)
    # The expected values belong to the model that transformers loads from that folder.
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager").eval()
    loaded = {name: parameter.detach() for name, parameter in weights(model).items()}
    loaded = loaded if name.endswith(("fused", "mxfp4")) else published(loaded)
    assert all(torch.equal(tensor, stored[of]) for of, tensor in loaded.items() if of in stored)

    ids, mask = tokens(lengths, config["vocab_size"], seed)
    logits, loss = evaluate(model, ids, mask)
    loss.backward()
    gradients = {name: parameter.grad.clone() for name, parameter in model.named_parameters()}
    # The router of one expert has no gradient, and experts without tokens have none.
    told = [gradient for of, gradient in gradients.items() if not (name == "qwen3_moe_one" and of.endswith("gate.weight"))]
    assert all(gradient.abs().max() > 1e-6 for gradient in told), "a gradient of zero tells nothing"
    gradients = published(gradients)
    idle = sum(bool((gradient == 0).all()) for gradient in gradients.values())
    # Three experts with three matrices in each of two layers.
    assert idle == (18 if name == "qwen3_moe_idle" else int(name == "qwen3_moe_one")), f"{idle} gradients of zero"
    metadata = {"format": "grpo-model/1", "source": source()}
    save_file(document(ids, mask, logits, loss, gradients), folder / "expected.safetensors", metadata)
    if dtype == "float32":
        save_file(optimizer_step(model), folder / "adamw.safetensors", {key: str(value) for key, value in ADAMW.items()})
    size = sum(path.stat().st_size for path in folder.iterdir())
    print(f"{name:16} loss {loss.item():.4f}  largest logit {logits.abs().max():.2f}  {size / 1e3:.0f} kB")


def random_wrapper(name, seed):
    """Returns a model of images and text with random weights."""
    family, text, config, *_ = WRAPPERS[name]
    torch.manual_seed(seed)
    config_class, model_class = WRAPPER_CLASSES[family]
    text = SHAPE | {"bos_token_id": 1, "eos_token_id": 2} | text
    return randomised(model_class(config_class(text_config=text, **config, attn_implementation="eager")), family)


def wrapper_json(config, layout):
    """Returns config.json as folders on the Hub have it."""
    config = json.loads(json.dumps(config))
    text = config["text_config"]
    if layout == "flat":
        del config["text_config"]
        rope = text.pop("rope_parameters")
        text |= {"rope_theta": rope["rope_theta"], "rope_scaling": {"type": "mrope", "mrope_section": rope["mrope_section"]}}
        for key in ["layer_types", "model_type"]:
            text.pop(key, None)
        config = text | config
    elif layout == "defaults":
        rope = text.pop("rope_parameters")["full_attention"]
        text["rope_scaling"] = {key: rope[key] for key in ["rope_type", "factor"]}
        for key in ["num_attention_heads", "num_key_value_heads", "tie_word_embeddings"]:
            text.pop(key, None)
        del config["tie_word_embeddings"]
    elif layout == "hub":
        text |= {"global_head_dim": text.pop("per_layer_config")["2"]["head_dim"], "num_global_key_value_heads": None}
    elif layout == "untied":
        del config["tie_word_embeddings"], text["tie_word_embeddings"]
    config["torch_dtype" if layout not in (5, "hub") else "dtype"] = config.pop("dtype")
    return config


def load_wrapper(folder):
    """Returns the model of images and text in a folder."""
    loaded = transformers.AutoModelForImageTextToText.from_pretrained(
        folder, dtype=torch.float32, attn_implementation="eager", output_loading_info=True)
    model, report = loaded
    assert not any(report[key] for key in ["missing_keys", "unexpected_keys", "mismatched_keys"]), report
    return model.eval()


def of_text(tensors):
    """Returns the tensors of the text decoder by the names of a decoder without a wrapper."""
    named = {name.replace("model.language_model.", "model."): tensor for name, tensor in tensors.items()}
    return {name: tensor for name, tensor in named.items() if name.startswith(("model.embed_tokens", "model.layers", "model.norm", "lm_head"))}


def make_wrapper(out, name, seed):
    family, config, _, layout, names, lengths = WRAPPERS[name]
    folder = out / name
    shutil.rmtree(folder, ignore_errors=True)
    model = random_wrapper(name, seed)
    model.save_pretrained(folder)
    (folder / "generation_config.json").unlink(missing_ok=True)
    path = folder / "config.json"
    path.write_text(json.dumps(wrapper_json(json.loads(path.read_text()), layout), indent=2, sort_keys=True) + "\n")
    # A file of the image processor, which exports copy.
    (folder / "preprocessor_config.json").write_text('{\n  "do_resize": true,   "patch_size": 14\n}\n')
    if names == "modules":
        stored = {n: p.detach().contiguous() for n, p in model.named_parameters()}
        save_file(stored, folder / "model.safetensors", {"format": "pt"})
    before = {n: p.clone() for n, p in model.named_parameters()}
    model = load_wrapper(folder)
    assert all(torch.equal(parameter, before[n]) for n, parameter in model.named_parameters())

    ids, mask = tokens(lengths, config["vocab_size"] - 4, seed)
    logits, loss = evaluate(model, ids, mask)
    loss.backward()
    gradients = {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}
    assert set(of_text(gradients)) == set(of_text(before)) and len(of_text(gradients)) == len(gradients)
    assert all(gradient.abs().max() > 1e-6 for gradient in gradients.values()), "a gradient of zero tells nothing"
    metadata = {"format": "grpo-model/1", "source": source()}
    save_file(document(ids, mask, logits, loss, gradients), folder / "expected.safetensors", metadata)
    stepped = of_text(optimizer_step(model))
    save_file(stepped, folder / "adamw.safetensors", {key: str(value) for key, value in ADAMW.items()})
    size = sum(path.stat().st_size for path in folder.iterdir())
    print(f"{name:16} loss {loss.item():.4f}  largest logit {logits.abs().max():.2f}  {size / 1e3:.0f} kB")


def make_adapter(out, name, suffix, targets):
    """Writes an adapter in PEFT's layout with random A and B, and the results of the adapted model; the frozen base has no gradient."""
    config = {"r": 4, "lora_alpha": 6, **targets}
    folder = out / f"{name}{suffix}"
    shutil.rmtree(folder, ignore_errors=True)
    torch.manual_seed(99)
    load = transformers.AutoModelForCausalLM.from_pretrained
    base = load_wrapper(out / name) if name in WRAPPERS else load(out / name, dtype=torch.float32, attn_implementation="eager")
    model = get_peft_model(base, LoraConfig(**config, lora_dropout=0.0, bias="none", task_type="CAUSAL_LM"))
    with torch.no_grad():
        for parameter in (p for p in model.parameters() if p.requires_grad):
            parameter.copy_(0.15 * torch.randn_like(parameter))
    model.eval()
    model.peft_config["default"].base_model_name_or_path = name
    model.save_pretrained(folder, save_embedding_layers=False)
    (folder / "README.md").unlink(missing_ok=True)
    # peft writes a set, whose order changes from run to run.
    path = folder / "adapter_config.json"
    written = json.loads(path.read_text())
    for key in ["target_modules", "target_parameters"]:
        if isinstance(written[key], list):
            written[key].sort()
    path.write_text(json.dumps(written, indent=2, sort_keys=True) + "\n")
    saved = load_file(folder / "adapter_model.safetensors")

    given = load_file(out / name / "expected.safetensors")
    ids, mask = given["ids"], given["mask"].long()
    logits, loss = evaluate(model, ids, mask)
    loss.backward()
    gradients = {n.replace(".default", ""): p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}
    assert set(gradients) == set(saved), set(gradients) ^ set(saved)
    metadata = {"format": "grpo-model/1", "source": f"{source()}, peft {peft.__version__}"}
    save_file(document(ids, mask, logits, loss, gradients), folder / "expected.safetensors", metadata)
    merged = published({n: p.detach().contiguous() for n, p in weights(model.merge_and_unload()).items()})
    merged = of_text(merged) if name in WRAPPERS else merged
    save_file(merged, folder / "merged.safetensors", {"format": "pt"})
    size = sum(path.stat().st_size for path in folder.iterdir())
    print(f"{name + suffix:16} loss {loss.item():.4f}  largest logit {logits.abs().max():.2f}  {size / 1e3:.0f} kB")


def make_router(out, name):
    """Writes the load balancing loss of transformers, its gradients, and the number of tokens of each expert.

    The last token of a sequence is left out, because it predicts nothing.
    """
    folder = out / name
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager").eval()
    config, given = model.config, load_file(folder / "expected.safetensors")
    ids, mask = given["ids"], given["mask"].long()
    counted = torch.cat([mask[:, 1:], torch.zeros_like(mask[:, :1])], 1)
    experts = getattr(config, "num_experts", None) or config.num_local_experts
    function = sys.modules[type(model).__module__].load_balancing_loss_func
    logits = model(input_ids=ids, attention_mask=mask, output_router_logits=True).router_logits

    def aux_loss(rows):
        of_rows = [layer.reshape(*ids.shape, -1)[rows].flatten(0, 1) for layer in logits]
        return function(tuple(of_rows), experts, config.num_experts_per_tok, counted[rows])

    together = aux_loss(slice(None))
    together.backward()
    chosen = [layer.topk(config.num_experts_per_tok, -1).indices[counted.flatten().bool()].flatten() for layer in logits]
    tensors = {
        "aux_loss": together.detach().reshape(()),
        "aux_loss.mean": torch.stack([aux_loss(slice(i, i + 1)).detach() for i in range(len(ids))]).mean(),
        "tokens": torch.stack([torch.bincount(layer, minlength=experts) for layer in chosen]).float(),
    }
    # Gradients of routers, and of everything below the last one that is small.
    gradients = {n: p.grad for n, p in model.named_parameters() if p.grad is not None and (p.ndim == 1 or "mlp.gate." in n or "router" in n)}
    tensors |= {f"expected.grad.{n}": gradient.contiguous() for n, gradient in gradients.items()}

    # Every token goes to given experts, whatever its router prefers.
    experts_of = []

    def given_experts(values, k, dim=-1):
        token = torch.arange(values.shape[0])[:, None]
        experts_of.append((7 * token + 3 * len(experts_of) + torch.arange(k)) % experts)
        return values.gather(-1, experts_of[-1]), experts_of[-1]

    model.zero_grad()
    with unittest.mock.patch("torch.topk", given_experts):
        _, loss = evaluate(model, ids, mask)
    loss.backward()
    tensors["replayed.loss"] = loss.detach().reshape(())
    tensors["replayed.experts"] = torch.stack([layer.reshape(*ids.shape, -1) for layer in experts_of], 2).float()
    replayed = {n: p.grad for n, p in model.named_parameters() if n in gradients}
    tensors |= {f"replayed.grad.{n}": gradient.contiguous() for n, gradient in replayed.items()}
    save_file(tensors, folder / "router.safetensors", {"format": "grpo-model/1", "source": source()})
    print(f"{name:16} load balancing loss {together.item():.4f}  {len(gradients)} gradients")


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", nargs="?", type=Path, default=HERE)
    parser.add_argument("--only", nargs="*", default=[*CHECKPOINTS, *WRAPPERS], help="names of checkpoints (default: all)")
    arguments = parser.parse_args()
    out, wanted = arguments.out, arguments.only
    torch.set_num_threads(1)
    for seed, name in enumerate(CHECKPOINTS, 1):
        if name in wanted:
            make(out, name, seed)
    for seed, name in enumerate(WRAPPERS, 101):
        if name in wanted:
            make_wrapper(out, name, seed)
    for name in LORA:
        if name in wanted:
            make_adapter(out, name, "_lora", {"target_modules": LORA[name]})
    for name, targets in EXPERTS_LORA.items():
        if name in wanted:
            make_adapter(out, name, "_experts_lora", targets)
    for name in ROUTERS:
        if name in wanted:
            make_router(out, name)


if __name__ == "__main__":
    main()
