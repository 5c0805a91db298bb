"""What a loop of user code knows of a run is let go when the run has ended."""

import asyncio
import gc
import weakref

from sharpen.agent.rollout.user_loop import Run, UserLoop


def test_a_run_that_has_ended_is_let_go() -> None:
    """Red when the run keeps its task: the loop knows the owner of each task for as long as there is the task, and
    so both, with the workflow's answer, for as long as there is the loop (12 KB for each rollout)."""
    loop = UserLoop()
    try:

        async def work() -> str:
            await asyncio.ensure_future(asyncio.sleep(0))  # a task of the user's, which has the same owner
            return "done"

        known = []
        for number in range(3):
            run = Run(f"rollout {number}", 60.0)
            loop.start(run, work)
            assert run.future.result(60.0) == "done"
            known.append(weakref.ref(run))
            del run
        last = Run("last", 60.0)  # its turn comes after the callbacks of the others
        loop.start(last, work)
        last.future.result(60.0)
        gc.collect()
        assert [ref() for ref in known] == [None, None, None]
    finally:
        loop.close()
