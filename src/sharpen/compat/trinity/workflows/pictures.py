"""Trinity's workflow of one call with images: the row's question with its images, scored by a reward function.

In: a `Task` whose row holds the images under `image_key`; the question says `<image>` where each belongs. Out: one
experience.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from sharpen.agent.tasks.images import TAG, with_images
from sharpen.compat.trinity.simple import BOXED_AFTER_THINKING, AsyncSimpleWorkflow, SimpleWorkflow
from sharpen.compat.trinity.task import Task
from sharpen.errors import DatasetError


class SimpleMMWorkflow(SimpleWorkflow):
    """A question with images, one answer, scored by `task_args.reward_fn`. Without a system prompt it asks for thoughts
    in tags and the answer in a box."""

    images: Sequence[Any]
    videos: Sequence[Any]

    def reset(self, task: Task) -> None:
        """Read the task. Raises `ConfigError` without a reward function, `DatasetError` for a row with videos."""
        super().reset(task)
        if self.system_prompt is None:
            self.system_prompt = BOXED_AFTER_THINKING
        self.images = _field(task, task.format_args.image_key)
        self.videos = _field(task, task.format_args.video_key)

    def format_messages(self) -> list[dict[str, Any]]:
        """The messages, with the images in the question."""
        messages = super().format_messages()
        place = next(place for place, message in enumerate(messages) if message["role"] == "user")
        messages[place] = build_mm_message(messages[place]["content"], self.images, self.videos)
        return messages


class AsyncSimpleMMWorkflow(AsyncSimpleWorkflow, SimpleMMWorkflow):
    """As `SimpleMMWorkflow`, asynchronous."""


def build_mm_message(prompt: str, images: Sequence[Any], videos: Sequence[Any] = ()) -> dict[str, Any]:
    """A user's message of a text and its images: each `<image>` takes the next one, those that are left begin it.

    Raises `DatasetError` if there are too few images, and for videos.
    """
    if len(videos):
        raise DatasetError(f"the question has {len(videos)} videos, which no model reads here: use images")
    if prompt.count(TAG) > len(images):
        raise DatasetError(f"the question says {TAG} {prompt.count(TAG)} times, but its row has {len(images)} images")
    return with_images([{"role": "user", "content": prompt}], images)[0]


def _field(task: Task, key: str | None) -> Sequence[Any]:
    """What the row holds in a field of several things, or of one."""
    value = None if key is None else task.raw_task.get(key)
    if value is None:
        return ()
    return value if isinstance(value, list | tuple) else (value,)
