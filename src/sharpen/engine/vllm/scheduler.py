"""vLLM's scheduler for mixtures of experts on a CPU: it returns the experts of every token, as with a GPU.

In: vLLM's core process, which imports this module because `engine.vllm.start` names the class. Out: outputs of
requests with their experts, which `engine.vllm.experts` records in the workers.

vLLM 0.32 refuses the setting that does this (`enable_return_routed_experts`) where there is no Triton, though nothing
in its scheduler needs it.
"""

from __future__ import annotations

from typing import Any

from vllm.distributed.aux_output_connector.connector import AuxOutputSchedulerConnector
from vllm.v1.core.sched.scheduler import Scheduler


class ReturningScheduler(Scheduler):  # type: ignore[misc]
    """vLLM's scheduler, with vLLM's connector of experts."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.aux_output_connector = AuxOutputSchedulerConnector()
