"""Experts as vLLM returns them, in Sharpen's form. (With a real vLLM: tests/vllm/test_vllm_experts.py.)"""

import numpy as np
import pytest
from expert_toys import make_experts

from sharpen.engine.vllm.engine import Routes
from sharpen.errors import EngineError
from sharpen.models.routing import routing_of


def test_rows_of_the_last_tokens_and_of_the_layers_that_have_experts():
    """GLM-4-MoE's first layer has none. Red when all layers are taken, or the first rows."""
    routing = routing_of(make_experts("glm4_moe"))
    assert routing is not None
    returned = np.arange(5 * 2 * 2).reshape(5, 2, 2)
    found = Routes(routing).read(returned, 3)
    np.testing.assert_array_equal(found, returned[2:, 1:])
    assert found.dtype == np.uint8


@pytest.mark.parametrize("returned", [None, np.zeros((2, 2, 2), np.uint8)])
def test_trap_30_too_few_experts_are_an_error(returned):
    """Red when they are filled up, or the check is gone."""
    routing = routing_of(make_experts("glm4_moe"))
    assert routing is not None
    with pytest.raises(EngineError, match=r"returned the experts of \d tokens, not of 3"):
        Routes(routing).read(returned, 3)
