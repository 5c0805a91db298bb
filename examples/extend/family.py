"""A family of models of one's own: Llama with a feed-forward part of squared ReLUs, and no gate.

sharpen run --config run.yaml --set 'families=[examples/extend/family.py:SQUARES]' --set model.model_path=<folder>
"""

from typing import Any

import torch
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

from sharpen.models.table import Family


class SquaresConfig(LlamaConfig):
    """A configuration of Llama's; its `model_type` is what `config.json` says."""

    model_type = "squares"


class SquaredReLU(nn.Module):
    """down(relu(up(x))²)."""

    def __init__(self, config: Any) -> None:
        super().__init__()
        self.up_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.down_proj = nn.Linear(config.intermediate_size, config.hidden_size, bias=False)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        """Compute it, whatever the shape."""
        mixed: torch.Tensor = self.down_proj(self.up_proj(hidden).relu().square())
        return mixed


class SquaresForCausalLM(LlamaForCausalLM):
    """Llama, whose attention calls transformers' attention interface; so engine and trainer put their own there."""

    config_class = SquaresConfig

    def __init__(self, config: SquaresConfig) -> None:
        super().__init__(config)
        for layer in self.model.layers:
            layer.mlp = SquaredReLU(config)
        self.post_init()


AutoConfig.register("squares", SquaresConfig, exist_ok=True)
AutoModelForCausalLM.register(SquaresConfig, SquaresForCausalLM, exist_ok=True)

SQUARES = Family(name="Squares", types=("squares",), in_vllm=False)
"""It needs nothing beside plain attention (`needs`), and vLLM has no class for it."""
