"""Makes the table of docs/use/memory.md: which model fits on which GPU, trained in which way, by `sharpen.run.plan`.

In: the shapes of published models, below. Out: the table, written into the page. Nothing is measured and no GPU is
needed: it is arithmetic, as every plan before a run. It takes some minutes.
"""

from __future__ import annotations

import re
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from transformers import PretrainedConfig, Qwen3Config, Qwen3MoeConfig

from sharpen.config.load import resolve
from sharpen.learning.recipe import TrainingRecipe, recipe_of
from sharpen.run.plan.case import Case, Models, read_models
from sharpen.run.plan.hardware import Hardware
from sharpen.run.plan.predict import plan
from sharpen.run.plan.workload import expected

PAGE = Path(__file__).parent / "use" / "memory.md"
GPUS_GB = (16, 24, 48, 80, 141)
SHAPES: Mapping[str, Mapping[str, Any]] = {
    "0.6B": {"hidden": 1024, "inner": 3072, "layers": 28, "heads": 16, "tied": True},
    "1.7B": {"hidden": 2048, "inner": 6144, "layers": 28, "heads": 16, "tied": True},
    "4B": {"hidden": 2560, "inner": 9728, "layers": 36, "heads": 32, "tied": True},
    "8B": {"hidden": 4096, "inner": 12288, "layers": 36, "heads": 32, "tied": False},
    "14B": {"hidden": 5120, "inner": 17408, "layers": 40, "heads": 40, "tied": False},
    "32B": {"hidden": 5120, "inner": 25600, "layers": 64, "heads": 64, "tied": False},
}
"""The dense Qwen3 models as published: hidden size, size of the feed-forward layers, layers, heads."""
CONFIGS: Mapping[str, PretrainedConfig] = {
    "30B, 3B active": Qwen3MoeConfig(num_hidden_layers=48, head_dim=128, intermediate_size=6144),
}
"""Qwen3-MoE with 128 experts, as published. There is no hybrid model: its layers are traced chunk by chunk, which takes
long."""
WAYS: Mapping[str, Mapping[str, Any]] = {
    "AdamW": {},
    "Muon": {"optimizer": "muon"},
    "AdamW in 8 bits": {"optimizer": "adamw_8bit"},
    "LoRA": {"lora": {"rank": 16}},
    "`base: shared`": {"lora": {"rank": 16, "base": "shared"}},
    "`base: nf4`": {"lora": {"rank": 16, "base": "nf4"}},
}
"""The settings of `trainer` in each column, beside gradient checkpointing."""


def configs() -> Iterator[tuple[str, PretrainedConfig]]:
    """Yield the models of the table by name."""
    for name, shape in SHAPES.items():
        yield (
            name,
            Qwen3Config(
                hidden_size=shape["hidden"],
                intermediate_size=shape["inner"],
                num_hidden_layers=shape["layers"],
                num_attention_heads=shape["heads"],
                num_key_value_heads=8,
                head_dim=128,
                vocab_size=151_936,
                tie_word_embeddings=shape["tied"],
            ),
        )
    yield from CONFIGS.items()


def recipe_for(folder: str, trainer: Mapping[str, Any]) -> TrainingRecipe:
    """Return the run of a column: 8 tasks x 8 rollouts a step, without a KL term, at most 4,096 tokens a sequence."""
    settings = {
        "model": {"model_path": folder, "max_model_len": 4096, "max_tokens": 2048},
        "train_dataset": {"path": "tasks.jsonl"},
        "algorithm": {"algorithm_type": "grpo", "group_size": 8, "batch_size": 8},
        "loss": {"kl": "none"},
        "trainer": {"gradient_checkpointing": True, "max_tokens_per_micro_batch": 4096, **trainer},
    }
    return recipe_of(resolve(None, settings).config)


def smallest(recipe: TrainingRecipe, models: Models) -> str:
    """Return the size in GB of the smallest GPU on which a run fits, or a dash. What is held at once in the engine and
    in the output layer goes by the GPU's size."""
    workload = expected(recipe.config)
    for size in GPUS_GB:
        gpu = Hardware(name="a GPU", kind="cuda", count=1, memory_bytes=size * 10**9)
        case = Case(recipe=recipe, models=models, hardware=gpu, workload=workload, engine="embedded")
        (place,) = plan(case, suggests=False).places
        if place.fits:
            return str(size)
    return "–"


def lines() -> Iterator[str]:
    """Yield the table's lines."""
    yield "| model | " + " | ".join(WAYS) + " |"
    yield "|---" * (1 + len(WAYS)) + "|"
    for name, config in configs():
        with tempfile.TemporaryDirectory() as folder:
            config.save_pretrained(folder)
            recipes = [recipe_for(folder, trainer) for trainer in WAYS.values()]
            models = read_models(recipes[0])  # once: a pass is traced once for each object
        yield f"| {name} | " + " | ".join(smallest(recipe, models) for recipe in recipes) + " |"


def page(table: str) -> str:
    """Return the page with this table."""
    return re.sub(r"(?<=<!-- table -->\n).*(?=<!-- end -->)", f"\n{table}\n\n", PAGE.read_text(), flags=re.DOTALL)


if __name__ == "__main__":
    PAGE.write_text(page("\n".join(lines())))
    print(f"wrote {PAGE}")
