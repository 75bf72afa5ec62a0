"""What the `config.json` of a model folder says, as far as rules ask; nothing is downloaded."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

_EXPERTS = ("n_routed_experts", "num_experts", "num_local_experts")
_LARGEST = 1 << 20


@dataclass(frozen=True)
class Checkpoint:
    """Facts of a checkpoint; None where it does not say.

    Args:
        architecture: The model class, such as `GlmMoeDsaForCausalLM`.
        experts: The number of routed experts.
        quantization: The algorithm, such as `NVFP4`.
        mla: Whether attention is multi-head latent attention, sparse or not.
    """

    architecture: str | None = None
    experts: int | None = None
    quantization: str | None = None
    mla: bool = False

    @classmethod
    def of(cls, model_path: Any) -> Checkpoint:
        """Read a folder; a name on a hub, and a folder without a readable `config.json`, tell nothing."""
        if not isinstance(model_path, str) or not model_path:
            return cls()
        config = _read(Path(model_path) / "config.json")
        text = config.get("text_config")
        inner = {**config, **text} if isinstance(text, dict) else config
        experts = next((inner[name] for name in _EXPERTS if isinstance(inner.get(name), int)), None)
        names = config.get("architectures")
        architecture = names[0] if isinstance(names, list) and names and isinstance(names[0], str) else None
        mla = bool(inner.get("kv_lora_rank"))
        return cls(architecture, experts, _quantization(Path(model_path), config), mla)


def _quantization(folder: Path, config: dict[str, Any]) -> str | None:
    section = config.get("quantization_config")
    if not isinstance(section, dict):
        section = _read(folder / "hf_quant_config.json").get("quantization")
    if not isinstance(section, dict):
        return None
    algorithm = section.get("quant_algo") or section.get("quant_method")
    return algorithm if isinstance(algorithm, str) else None


def _read(file: Path) -> dict[str, Any]:
    try:
        if file.stat().st_size > _LARGEST:
            return {}
        document = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return document if isinstance(document, dict) else {}
