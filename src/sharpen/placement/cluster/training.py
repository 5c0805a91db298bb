"""Places the ranks of a trainer in Ray, with engines or alone.

In: a `Connection` with resources reserved for the ranks, or a `RunConfig`. Out: `StartRanks`; `RayTraining`, the place
of a run without engines.
"""

from __future__ import annotations

import contextlib

from sharpen.config.run import RunConfig
from sharpen.learning.trainer.roles import TrainerPlan
from sharpen.placement.cluster.connect import Connection, Role
from sharpen.placement.cluster.placement import num_ranks, rank_bundles
from sharpen.placement.cluster.ranks import RankActor, RayRanks
from sharpen.placement.ranks.group import StartRanks


def rank_starter(connection: Connection, count: int, role: Role = "trainer rank", *, share: int = 1) -> StartRanks:
    """Return a function that starts `count` ranks. Rank i gets the role's bundle i, or one of `share` equal parts of
    it."""

    def start(plan: TrainerPlan) -> RayRanks:
        import ray

        options = [connection.options(role, rank, share=share) for rank in range(count)]
        return RayRanks(plan, [ray.remote(RankActor).options(**one).remote() for one in options])

    return start


class RayTraining:
    """Satisfies `execution.place.Place` for a trainer without engines. Even a single rank runs in an actor."""

    def __init__(self, config: RunConfig) -> None:
        """Start or join Ray and reserve the ranks' resources. Raises `ConfigError` as `cluster.serving.RayServing`."""
        with contextlib.ExitStack() as undo:
            self._ray = Connection(config.cluster, config.trainer.num_processes)
            undo.callback(self._ray.close)
            self._num_ranks = num_ranks(config, self._ray.num_gpus) or 1
            self._ray.reserve({"trainer rank": rank_bundles(config, self._ray.num_gpus, self._num_ranks)})
            self.ranks = rank_starter(self._ray, self._num_ranks)
            undo.pop_all()

    @property
    def line(self) -> str:
        """What runs where, for the user."""
        return f"execution: ray ({self._ray.line}), the trainer in {self._num_ranks} actor(s)"

    def close(self) -> None:
        """Release the resources, and end a Ray that was started here."""
        self._ray.close()
