"""Write a model folder small enough for a CPU, from nothing: no download, no weights.

There are no weight files: start the server with `--load-format dummy`, which fills the parameters
from a fixed seed. The answers are therefore noise, but the same noise each time.

The third family, GLM-5's own, is for SGLang's readers of configurations: no server of it starts on a CPU.

    python -m tests.support.tiny_model FOLDER [llama|glm4_moe|glm_moe_dsa]
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any, Literal, get_args

Family = Literal["llama", "glm4_moe", "glm_moe_dsa"]

_SPECIAL = ("<|endoftext|>", "<|system|>", "<|user|>", "<|assistant|>")
VOCABULARY = 256 + len(_SPECIAL)

_SHARED: dict[str, Any] = {
    "hidden_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "intermediate_size": 256,
    "vocab_size": VOCABULARY,
    "max_position_embeddings": 2048,
    "hidden_act": "silu",
    "rms_norm_eps": 1e-5,
    "initializer_range": 0.02,
    "rope_theta": 10000.0,
    "tie_word_embeddings": False,
    "attention_bias": False,
    "bos_token_id": 256,
    "eos_token_id": 256,
    "pad_token_id": 256,
    "torch_dtype": "bfloat16",
    "use_cache": True,
}

_GLM4_MOE: dict[str, Any] = {
    **_SHARED,
    "architectures": ["Glm4MoeForCausalLM"],
    "model_type": "glm4_moe",
    "first_k_dense_replace": 1,
    "moe_intermediate_size": 64,
    "n_group": 1,
    "n_routed_experts": 4,
    "n_shared_experts": 1,
    "norm_topk_prob": True,
    "num_experts_per_tok": 2,
    "num_nextn_predict_layers": 0,
    "partial_rotary_factor": 0.5,
    "routed_scaling_factor": 1.0,
    "topk_group": 1,
    "use_qk_norm": False,
}

_CONFIGS: dict[Family, dict[str, Any]] = {
    "llama": {
        **_SHARED,
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "mlp_bias": False,
    },
    "glm4_moe": _GLM4_MOE,
    "glm_moe_dsa": {
        **_GLM4_MOE,
        "architectures": ["GlmMoeDsaForCausalLM"],
        "model_type": "glm_moe_dsa",
        "index_head_dim": 32,
        "index_n_heads": 4,
        "index_topk": 64,
        "kv_lora_rank": 32,
        "max_position_embeddings": 202752,
        "n_routed_experts": 256,
        "num_experts_per_tok": 8,
        "q_lora_rank": 32,
        "qk_head_dim": 48,
        "qk_nope_head_dim": 32,
        "qk_rope_head_dim": 16,
        "rope_scaling": None,
        "v_head_dim": 32,
        "quantization_config": {"quant_method": "modelopt", "quant_algo": "NVFP4"},
    },
}


def write_tiny_model(folder: Path, family: Family = "llama") -> Path:
    """Write config.json and a byte-level tokenizer of 260 tokens into `folder`, and return it."""
    folder.mkdir(parents=True, exist_ok=True)
    _write(folder / "config.json", _CONFIGS[family])
    _write(folder / "tokenizer.json", _tokenizer())
    _write(
        folder / "tokenizer_config.json",
        {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "bos_token": _SPECIAL[0],
            "eos_token": _SPECIAL[0],
            "pad_token": _SPECIAL[0],
            "model_max_length": _SHARED["max_position_embeddings"],
            "clean_up_tokenization_spaces": False,
        },
    )
    _write(folder / "generation_config.json", {"bos_token_id": 256, "eos_token_id": 256, "pad_token_id": 256})
    return folder


def _tokenizer() -> dict[str, Any]:
    byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": False, "use_regex": False}
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [
            {
                "id": 256 + index,
                "content": token,
                "special": True,
                "normalized": False,
                "single_word": False,
                "lstrip": False,
                "rstrip": False,
            }
            for index, token in enumerate(_SPECIAL)
        ],
        "normalizer": None,
        "pre_tokenizer": byte_level,
        "post_processor": None,
        "decoder": byte_level,
        "model": {
            "type": "BPE",
            "dropout": None,
            "unk_token": None,
            "continuing_subword_prefix": None,
            "end_of_word_suffix": None,
            "fuse_unk": False,
            "byte_fallback": False,
            "ignore_merges": False,
            "vocab": {symbol: index for index, symbol in enumerate(_byte_alphabet())},
            "merges": [],
        },
    }


def _byte_alphabet() -> list[str]:
    """The 256 symbols of byte-level BPE: printable bytes as themselves, the rest moved above 255."""
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    moved = iter(range(0x100, 0x200))
    return [chr(byte) if byte in printable else chr(next(moved)) for byte in range(256)]


def _write(path: Path, content: dict[str, Any]) -> None:
    path.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")


def main(argv: list[str]) -> int:
    folder, family = Path(argv[0]), argv[1] if len(argv) > 1 else "llama"
    if family not in get_args(Family):
        print(f"unknown family {family!r}: choose from {', '.join(get_args(Family))}", file=sys.stderr)
        return 2
    print(write_tiny_model(folder, family))  # type: ignore[arg-type]
    return 0


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
