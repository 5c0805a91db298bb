"""Where the tensors of a pack's loss are. PyTorch's meta device stands in for a GPU: its tensors have no contents, so
whatever is read from them, or computed with a tensor of the CPU, raises."""

import numpy as np
import pytest
import torch

from sharpen.learning.algorithm.objective import policy_objective
from sharpen.learning.algorithm.presets import PRESETS
from sharpen.learning.trainer.output import OutputLayer
from sharpen.learning.trainer.scores import OtherModel, score_rows

META = torch.device("meta")
ROWS, ENTRIES, SIZE, VOCABULARY = 12, 20, 8, 50


@pytest.mark.parametrize("name", [name for name, preset in PRESETS.items() if preset.policy_loss])
@pytest.mark.parametrize("max_logits", [1 << 20, 4 * VOCABULARY])
def test_loss_and_gradient_of_a_pack_read_nothing_from_its_device(name, max_logits):
    """At once, and in chunks that are computed again.

    Break: in `call_log_ratio` read the largest number of a call, or in `policy_objective` say
    `if ratio_E.max() > 0`.
    """
    algorithm = PRESETS[name]
    head = torch.nn.Linear(SIZE, VOCABULARY, bias=False, device=META)
    output = OutputLayer(embeddings=head)
    hidden_RC = torch.empty(ROWS, SIZE, device=META, requires_grad=True)
    compared = None
    if algorithm.distill is not None and algorithm.distill.of_vocabulary:
        hidden = torch.empty(ROWS, SIZE, device=META)
        compared = OtherModel(hidden_RC=hidden, head=output, divergence=algorithm.distill.divergences)
    rows_E = np.arange(ENTRIES) % ROWS
    temperatures_R = torch.empty(ROWS, dtype=torch.float64, device=META)
    found = score_rows(output, hidden_RC, temperatures_R, rows_E, rows_E, True, compared, None, max_logits)
    known_E = torch.empty(ENTRIES, device=META)
    calls_E = torch.empty(ENTRIES, dtype=torch.int64, device=META)
    loss, sums, _ = policy_objective(
        algorithm,
        found[0],
        known_E,
        known_E,
        known_E,
        known_E,
        found[1],
        calls_E,
        known_E,
        divergence_E=found[2] if compared is not None else None,
    )
    loss.backward()
    assert hidden_RC.grad.device == head.weight.grad.device == sums.policy_loss.device == META
