"""Small configurations that the tests of plans share: models of three families, and runs of them."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from transformers import LlamaConfig, Qwen2Config, Qwen3Config

from sharpen.config.load import resolve
from sharpen.config.run import RunConfig
from sharpen.learning.recipe import EngineType, RolloutRecipe, recipe_of
from sharpen.run.plan.case import Case, read_models
from sharpen.run.plan.hardware import Hardware
from sharpen.run.plan.workload import Workload, expected

FAMILIES = {"qwen2": Qwen2Config, "qwen3": Qwen3Config, "llama": LlamaConfig}


def model_config(family: str = "qwen3", *, tied: bool = True, **changes: Any) -> Any:
    """A model of 3 layers, 64 wide, 4 heads of 16 (2 for keys and values), 500 words."""
    return FAMILIES[family](
        **{
            "hidden_size": 64,
            "intermediate_size": 160,
            "num_hidden_layers": 3,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "head_dim": 16,
            "vocab_size": 500,
            "tie_word_embeddings": tied,
            **changes,
        }
    )


def write_config(folder: Path, config: Any) -> Path:
    """A model folder with nothing but its configuration."""
    folder.mkdir(parents=True, exist_ok=True)
    config.save_pretrained(folder)
    return folder


def run_config(folder: Path, settings: Mapping[str, Any] | None = None) -> RunConfig:
    """A run of the model in `folder`: two tasks of four rollouts."""
    base = {
        "model": {"model_path": str(folder), "max_model_len": 256, "max_tokens": 64},
        "train_dataset": {"path": "tasks.jsonl"},
        "algorithm": {"algorithm_type": "grpo", "group_size": 4, "batch_size": 2},
        "evaluation": {"before_and_after": False},
    }
    return resolve(None, _merged(base, settings or {})).config


def case_of(
    config: RunConfig,
    hardware: Hardware | None = None,
    workload: Workload | None = None,
    engine: EngineType = "embedded",
) -> Case:
    """A run, on a GPU of 16 GiB and with every sequence as long as it may be, if not said otherwise."""
    recipe = recipe_of(config)
    return Case(
        recipe=recipe,
        models=read_models(recipe),
        hardware=hardware or gpu(16),
        workload=workload or expected(config),
        engine=engine if isinstance(recipe, RolloutRecipe) else None,
    )


def _merged(base: dict[str, Any], settings: Mapping[str, Any]) -> dict[str, Any]:
    merged = {section: dict(values) for section, values in base.items()}
    for key, value in settings.items():
        section, name = key.split(".")
        merged.setdefault(section, {})[name] = value
    return merged


def gpu(gib: float, count: int = 1) -> Hardware:
    """A GPU with so much memory."""
    return Hardware(name="GPU", kind="cuda", count=count, memory_bytes=int(gib * 2**30))


CPU = Hardware(name="CPU", kind="cpu", count=1, memory_bytes=8 * 2**30)
