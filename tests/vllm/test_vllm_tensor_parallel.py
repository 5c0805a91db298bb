"""An engine whose layers are shared out over two workers: the same distribution, also after new weights."""

from __future__ import annotations

import numpy as np
from vllm_served import request, scored, start, weights


def test_two_workers_serve_one_model_and_the_next(model, changed):
    """Each worker takes its part of every weight. Red without `pack_tied_layers` in `Transfer.finish_weight_update`."""
    asked = [request([506, 60 + i], noise=i) for i in range(4)]
    served = start(tensor_parallel_size=2)
    try:
        for version, current in ((0, model), (1, changed)):
            if version:
                served.run(served.engine.load(version, weights(current)))
            for one, generation in zip(asked, served.generate(*asked), strict=True):
                assert set(generation.versions.tolist()) == {version}
                np.testing.assert_allclose(generation.logprobs, scored(current, one, generation), atol=1e-4)
    finally:
        served.run(served.engine.close())
        served.thread.close()
