"""Compares folders that this crate writes with transformers and peft; main.rs runs this script.

python libraries.py make PLACE        creates random checkpoints of every family with transformers, and adapters with peft
python libraries.py compare PLACE     compares the folders that main.rs has rewritten, in every dtype, in one file and in several

Every tensor and every logit must be equal. A model without a source folder must load as the class of its family, without
missing or unexpected tensors.
"""

import argparse
import json
import pathlib
import warnings

import torch
from peft import LoraConfig, PeftModel, get_peft_model
from transformers import (
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    Gemma3Config,
    Gemma3TextConfig,
    Gemma4Config,
    Gemma4TextConfig,
    Glm4MoeConfig,
    GptOssConfig,
    GraniteConfig,
    LlamaConfig,
    Ministral3Config,
    Mistral3Config,
    MistralConfig,
    Olmo2Config,
    Olmo3Config,
    Phi3Config,
    Qwen2_5_VLConfig,
    Qwen2Config,
    Qwen2MoeConfig,
    Qwen3_5Config,
    Qwen3_5TextConfig,
    Qwen3Config,
    Qwen3MoeConfig,
    Qwen3VLConfig,
    SmolLM3Config,
)
from transformers.utils import logging

SHAPE = dict(
    vocab_size=64,
    hidden_size=32,
    intermediate_size=48,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    max_position_embeddings=4096,
)
LLAMA3 = dict(
    rope_type="llama3",
    rope_theta=5e5,
    factor=8.0,
    low_freq_factor=1.0,
    high_freq_factor=4.0,
    original_max_position_embeddings=1024,
)
LONGROPE = dict(
    rope_type="longrope",
    rope_theta=1e4,
    partial_rotary_factor=0.5,
    short_factor=[1.0, 1.5],
    long_factor=[2.0, 4.0],
    original_max_position_embeddings=1024,
)
DELTA_NET = dict(
    layer_types=["linear_attention", "full_attention"],
    linear_num_key_heads=2,
    linear_num_value_heads=4,
    linear_key_head_dim=4,
    linear_value_head_dim=6,
)
FAMILIES = {
    "qwen2": Qwen2Config(**SHAPE, eos_token_id=2, tie_word_embeddings=True),
    "qwen2-untied": Qwen2Config(**SHAPE, eos_token_id=2, tie_word_embeddings=False),
    "qwen3": Qwen3Config(**SHAPE, head_dim=16, eos_token_id=[2, 3]),
    "llama": LlamaConfig(**SHAPE, eos_token_id=[2, 3, 4], rope_parameters=LLAMA3),
    "mistral": MistralConfig(**SHAPE, eos_token_id=2, sliding_window=8),
    "ministral3": Ministral3Config(**SHAPE, eos_token_id=2, pad_token_id=0, head_dim=8),
    "smollm3": SmolLM3Config(**SHAPE, bos_token_id=1, eos_token_id=2, pad_token_id=0, no_rope_layer_interval=2),
    "olmo2": Olmo2Config(**SHAPE, eos_token_id=2, pad_token_id=0),
    "olmo3": Olmo3Config(**SHAPE, eos_token_id=2, pad_token_id=0, sliding_window=8),
    "granite": GraniteConfig(**SHAPE, eos_token_id=2, residual_multiplier=0.5, attention_multiplier=0.3),
    "phi3": Phi3Config(**SHAPE, eos_token_id=2, pad_token_id=0, original_max_position_embeddings=1024, rope_parameters=LONGROPE),
    "gemma3": Gemma3TextConfig(**SHAPE, eos_token_id=2, head_dim=8, sliding_window=8, sliding_window_pattern=2),
    "gemma4": Gemma4TextConfig(
        **SHAPE,
        eos_token_id=2,
        head_dim=8,
        global_head_dim=12,
        num_global_key_value_heads=1,
        attention_k_eq_v=True,
        hidden_size_per_layer_input=0,
        sliding_window=8,
        layer_types=["sliding_attention", "full_attention"],
        final_logit_softcapping=30.0,
    ),
    "glm4_moe": Glm4MoeConfig(
        **SHAPE,
        eos_token_id=2,
        head_dim=8,
        moe_intermediate_size=12,
        n_routed_experts=4,
        num_experts_per_tok=2,
        n_group=2,
        topk_group=1,
        routed_scaling_factor=1.5,
    ),
    "qwen2_moe": Qwen2MoeConfig(
        **SHAPE,
        eos_token_id=2,
        moe_intermediate_size=12,
        shared_expert_intermediate_size=20,
        num_experts=3,
        num_experts_per_tok=2,
        mlp_only_layers=[1],
    ),
    "qwen3_moe": Qwen3MoeConfig(**SHAPE, eos_token_id=2, head_dim=8, moe_intermediate_size=12, num_experts=3, num_experts_per_tok=2),
    "qwen3_5": Qwen3_5TextConfig(**SHAPE, eos_token_id=2, head_dim=8, **DELTA_NET),
    "gpt_oss": GptOssConfig(**SHAPE, eos_token_id=2, head_dim=8, num_local_experts=3, num_experts_per_tok=2, sliding_window=8),
}
# Models of images and text, with small towers.
SIGLIP = dict(
    hidden_size=8,
    intermediate_size=8,
    num_hidden_layers=1,
    num_attention_heads=2,
    image_size=28,
    patch_size=14,
    vision_use_head=False,
)
PIXTRAL = dict(
    model_type="pixtral",
    hidden_size=8,
    intermediate_size=8,
    num_hidden_layers=1,
    num_attention_heads=2,
    image_size=28,
    patch_size=14,
    head_dim=4,
)
QWEN_TOWER = dict(depth=1, hidden_size=16, intermediate_size=16, num_heads=2, out_hidden_size=32)
IMAGES = dict(image_token_id=60, video_token_id=61, vision_start_token_id=62, vision_end_token_id=63)
TEXT = SHAPE | dict(bos_token_id=1, eos_token_id=2, pad_token_id=0)
MROPE = dict(rope_type="default", rope_theta=1e6, mrope_section=[2, 1, 1])
WRAPPERS = {
    "gemma3-vision": Gemma3Config(
        text_config=TEXT | dict(head_dim=8, sliding_window=8, query_pre_attn_scalar=12),
        vision_config=SIGLIP,
        mm_tokens_per_image=4,
        image_token_index=60,
    ),
    "gemma4-vision": Gemma4Config(
        text_config=TEXT | dict(head_dim=8, global_head_dim=12, sliding_window=8, hidden_size_per_layer_input=0),
        vision_config=dict(
            hidden_size=8,
            intermediate_size=8,
            num_hidden_layers=1,
            num_attention_heads=2,
            num_key_value_heads=2,
            head_dim=4,
            patch_size=2,
            position_embedding_size=4,
        ),
        audio_config=None,
        image_token_id=60,
        boi_token_id=61,
        eoi_token_id=62,
        video_token_id=63,
    ),
    "qwen2-vl": Qwen2_5_VLConfig(
        text_config=TEXT | dict(rope_parameters=MROPE),
        vision_config=QWEN_TOWER | dict(fullatt_block_indexes=[0]),
        **IMAGES,
    ),
    "qwen3-vl": Qwen3VLConfig(
        text_config=TEXT | dict(head_dim=8, rope_parameters=MROPE | dict(mrope_interleaved=True)),
        vision_config=QWEN_TOWER | dict(num_position_embeddings=4, deepstack_visual_indexes=[0]),
        tie_word_embeddings=True,
        **IMAGES,
    ),
    "qwen3_5-vision": Qwen3_5Config(
        text_config=TEXT | DELTA_NET | dict(head_dim=8),
        vision_config=QWEN_TOWER | dict(num_position_embeddings=4),
        tie_word_embeddings=True,
        **IMAGES,
    ),
    "mistral3": Mistral3Config(
        text_config=TEXT | dict(model_type="mistral", head_dim=8), vision_config=PIXTRAL, tie_word_embeddings=False
    ),
    "ministral3-vision": Mistral3Config(text_config=TEXT | dict(model_type="ministral3", head_dim=8), vision_config=PIXTRAL),
}
# The classes of the models that main.rs makes without a source folder.
NEW = {
    "qwen2": "Qwen2",
    "qwen3": "Qwen3",
    "llama": "Llama",
    "mistral": "Mistral",
    "ministral3": "Ministral3",
    "smollm3": "SmolLM3",
    "olmo2": "Olmo2",
    "olmo3": "Olmo3",
    "granite": "Granite",
    "phi3": "Phi3",
    "gemma3_text": "Gemma3",
    "gemma4_text": "Gemma4",
    "glm4_moe": "Glm4Moe",
    "qwen2_moe": "Qwen2Moe",
    "qwen3_moe": "Qwen3Moe",
    "qwen3_5_text": "Qwen3_5",
    "gpt_oss": "GptOss",
}
ADAPTERS = [
    ("qwen2", dict(target_modules=["q_proj", "v_proj"], use_rslora=True)),
    ("qwen2", dict(target_modules=["o_proj", "lm_head"])),
    ("qwen2-untied", dict(target_modules=["q_proj", "lm_head"])),
    ("qwen3", dict(target_modules=r"model\.layers\.0\.(self_attn|mlp)\..*_proj")),
    ("llama", dict(target_modules="all-linear", init_lora_weights="gaussian")),
    ("phi3", dict(target_modules=["qkv_proj", "down_proj"])),
    ("gemma3", dict(target_modules="all-linear")),
    ("gemma3-vision", dict(target_modules=r"model\.language_model\..*_proj")),
    ("qwen2-vl", dict(target_modules=r"model\.language_model\..*(q|down)_proj|lm_head")),
    ("qwen3_moe", dict(target_modules=["q_proj", "k_proj", "v_proj", "o_proj"])),
    ("gpt_oss", dict(target_modules=["q_proj", "o_proj"])),
    ("gemma4", dict(target_modules="all-linear")),
    ("qwen3_5", dict(target_modules="all-linear")),
    ("qwen3_5-vision", dict(target_modules=r"model\.language_model\..*(in_proj_qkv|in_proj_b|out_proj|q_proj)")),
    ("qwen3_moe", dict(target_modules=["q_proj"], target_parameters=["mlp.experts.gate_up_proj", "mlp.experts.down_proj"])),
    ("gpt_oss", dict(target_modules=[], target_parameters=["mlp.experts.gate_up_proj", "mlp.experts.down_proj"])),
    ("qwen2_moe", dict(target_modules="all-linear")),
    ("qwen2_moe", dict(target_modules=["q_proj", "down_proj"], target_parameters=["mlp.experts.down_proj"])),
    ("gpt_oss", dict(target_modules=["o_proj"], target_parameters=["model.layers.1.mlp.experts.down_proj"])),
]


def load(folder, dtype):
    is_wrapper = "vision_config" in json.loads((folder / "config.json").read_text())
    auto = AutoModelForImageTextToText if is_wrapper else AutoModelForCausalLM
    model, report = auto.from_pretrained(folder, dtype=dtype, experts_implementation="eager", output_loading_info=True)
    assert not report["missing_keys"] and not report["unexpected_keys"] and not report["mismatched_keys"], report
    return model.eval()


def logits(model):
    # Tokens of images are the last ones.
    ids = torch.arange(48).reshape(2, 24) * 5 % (model.config.get_text_config().vocab_size - 4)
    with torch.no_grad():
        return model(ids).logits


def same(name, ours, theirs):
    left, right = ours.state_dict(), theirs.state_dict()
    assert left.keys() == right.keys(), left.keys() ^ right.keys()
    for key in left:
        assert torch.equal(left[key], right[key]), (name, key)
    assert torch.equal(logits(ours), logits(theirs)), name
    print(f"{name}: {len(left)} tensors and logits are the same")


def make(place):
    for name, config in (FAMILIES | WRAPPERS).items():
        torch.manual_seed(0)
        auto = AutoModelForImageTextToText if name in WRAPPERS else AutoModelForCausalLM
        model = auto.from_config(config)
        for parameter in model.parameters():
            torch.nn.init.normal_(parameter, std=0.2)
        model.generation_config.eos_token_id = config.get_text_config().eos_token_id
        model.save_pretrained(place / name)
    for number, (name, settings) in enumerate(ADAPTERS):
        torch.manual_seed(number)
        config = LoraConfig(r=4, lora_alpha=6, task_type="CAUSAL_LM", **settings)
        model = get_peft_model(load(place / name, "auto"), config)
        for key, parameter in model.named_parameters():
            if "lora_" in key:
                torch.nn.init.normal_(parameter, std=0.2)
        model.save_pretrained(place / f"theirs-{number}")


def compare(place):
    for name, config in (FAMILIES | WRAPPERS).items():
        for dtype in ["float32", "bfloat16", "float16"]:
            for limit in [5_000_000_000, 20_000]:
                target = place / f"{name}-{dtype}-{limit}"
                files = len(list(target.glob("*.safetensors")))
                assert (files > 1) == (limit < 10**9), files
                ours = load(target, "auto")
                assert str(ours.dtype) == f"torch.{dtype}", ours.dtype
                assert ours.generation_config.eos_token_id == config.get_text_config().eos_token_id
                rounded = getattr(torch, dtype)
                theirs = load(place / name, rounded)
                if getattr(ours, "_keep_in_fp32_modules", None):
                    # Of float16 models, transformers keeps some modules in float32, with the precision of the file.
                    ours, theirs = ours.to(rounded), load(place / name, torch.float32).to(rounded)
                same(f"{name} {dtype} in {files} file(s)", ours, theirs)
    for family, kind in NEW.items():
        model = load(place / f"new-{family}", "auto")
        assert type(model).__name__ == f"{kind}ForCausalLM" and model.dtype == torch.float32
        assert model.generation_config.eos_token_id == [2, 3] and torch.isfinite(logits(model)).all()
        if family in ["qwen2", "qwen3", "llama"]:
            rope = model.config.rope_parameters
            assert (rope["rope_type"], rope["rope_theta"]) == (("llama3", 5e5) if family == "llama" else ("default", 1e4))
        print(f"new {family}: {len(model.state_dict())} tensors")
    for number, (name, settings) in enumerate(ADAPTERS):
        theirs, ours = (
            PeftModel.from_pretrained(load(place / name, "auto"), place / f"{whose}-{number}").eval() for whose in ["theirs", "ours"]
        )
        assert not torch.equal(logits(ours), logits(load(place / name, "auto"))), "the adapter changes nothing"
        same(f"adapter {settings} of {name}", ours, theirs)


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("command", choices=["make", "compare"])
    parser.add_argument("place", type=pathlib.Path)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    {"make": make, "compare": compare}[arguments.command](arguments.place)


if __name__ == "__main__":
    main()
