"""Lets vLLM's workers return the experts of every token, in the outputs of their requests.

In: the model runner of a worker. Out: each of its steps hands the experts of its tokens to vLLM's own connector; that
one keeps them by the blocks of the prefix cache, so that tokens which are not computed again have theirs too.

vLLM 0.32 puts the connector only into its model runner V2, which needs Triton. All of the connector is plain torch, and
so are the routers of a CPU, which call it: `Steps` puts it into runner V1 there.
"""

from __future__ import annotations

import dataclasses
from types import SimpleNamespace
from typing import Any

import numpy as np
from vllm.distributed.aux_output_connector.connector import AuxRequestOutput
from vllm.distributed.aux_output_connector.worker import get_aux_output_connector
from vllm.model_executor.layers.fused_moe.routed_experts_capturer import (
    RoutedExpertsCapturer,
    bind_routed_experts_capturer,
)


@dataclasses.dataclass
class _Computed:
    """The experts of a step's tokens, by request."""

    outputs: dict[str, AuxRequestOutput]

    def enqueue_cpu_copy(self, num_sampled: Any, num_rejected: Any) -> None:
        """Do nothing: they are on the CPU."""

    def process_output(self) -> dict[str, AuxRequestOutput]:
        return self.outputs


class Uncached:
    """What vLLM's connector does, without a prefix cache, which that one needs: all tokens of a request are computed,
    so that nothing has to be kept."""

    def __init__(self, runner: Any) -> None:
        num_tokens = runner.vllm_config.scheduler_config.max_num_batched_tokens
        self._capturer = RoutedExpertsCapturer(max_num_batched_tokens=num_tokens, vllm_config=runner.vllm_config)
        bind_routed_experts_capturer(runner.model, self._capturer)

    def begin_step(self, metadata: Any) -> None:
        """Do nothing."""

    def prepare_output(self, batch: Any) -> _Computed:
        """Return the experts of the tokens that were computed."""
        ends = batch.query_start_loc_np
        dtype = self._capturer.output_dtype_name
        rows = self._capturer.snapshot_routing_data(int(ends[-1])).numpy().astype(dtype)
        each = zip(batch.req_ids, batch.num_computed_tokens_np, ends[:-1], ends[1:], strict=True)
        return _Computed({name: AuxRequestOutput(int(first), rows[start:end]) for name, first, start, end in each})


class Steps:
    """The steps of model runner V1, with a connector."""

    def __init__(self, runner: Any) -> None:
        """Wrap the two methods that a step calls. Raises `ValueError` if a router of the model cannot be recorded."""
        self.connector: Any = (
            get_aux_output_connector(runner.model, runner.vllm_config, runner.kv_cache_config)
            if runner.vllm_config.cache_config.enable_prefix_caching
            else Uncached(runner)
        )
        self._runner = runner
        self._execute, self._sample = runner.execute_model, runner.sample_tokens
        runner.execute_model, runner.sample_tokens = self.execute_model, self.sample_tokens
        self._pending: Any = None

    def execute_model(self, scheduled: Any, *args: Any, **kwargs: Any) -> Any:
        """Compute a step, and keep the experts of its tokens."""
        self.connector.begin_step(scheduled.aux_output_connector_metadata)
        output = self._execute(scheduled, *args, **kwargs)
        if scheduled.total_num_scheduled_tokens:
            batch = self._runner.input_batch
            counts = [scheduled.num_scheduled_tokens[request] for request in batch.req_ids]
            rows = SimpleNamespace(
                req_ids=list(batch.req_ids),
                num_computed_tokens_np=batch.num_computed_tokens_cpu[: len(counts)].copy(),
                query_start_loc_np=np.cumsum([0, *counts]),
            )
            self._pending = self.connector.prepare_output(rows)
        return output

    def sample_tokens(self, *args: Any, **kwargs: Any) -> Any:
        """Sample the tokens of a step, and add the experts to its output. Runner V1 on a CPU has no output in
        flight, and rejects no token."""
        output = self._sample(*args, **kwargs)
        pending, self._pending = self._pending, None
        if pending is not None:
            num_sampled = np.array([len(ids) for ids in output.sampled_token_ids])
            pending.enqueue_cpu_copy(num_sampled, np.zeros_like(num_sampled))
            output.aux_output_connector_output = pending.process_output()
        return output


def return_experts(runner: Any) -> None:
    """Let a model runner return experts, and those of all tokens again when a request begins anew: after new weights,
    under which its tokens before are computed again, and after it gave way to others."""
    connector = getattr(runner, "aux_output_connector", None) or Steps(runner).connector
    begin_step = connector.begin_step

    def begin(metadata: Any) -> None:
        begin_step(metadata and dataclasses.replace(metadata, requests=dict.fromkeys(metadata.requests, 0)))

    connector.begin_step = begin
