"""The programs of docs/use/trinity.md run as they are printed."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from trinity_serving import MakePlace

from sharpen.types import Outcome

PAGE = (Path(__file__).parents[2] / "docs" / "use" / "trinity.md").read_text(encoding="utf-8")


class MyAgent:
    def __init__(self, *, openai_client: Any, model_name: str) -> None:
        self.client, self.model_name = openai_client, model_name

    async def reply(self, query: str) -> str:
        messages: Any = [{"role": "user", "content": query}]
        answer = await self.client.chat.completions.create(model=self.model_name, messages=messages)
        return str(answer.choices[0].message.content)


def test_the_programs(make_place: MakePlace) -> None:
    workflow, reward = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)
    names: dict[str, Any] = {"MyAgent": MyAgent}
    exec(compile(workflow, "trinity.md", "exec"), names)
    settings = {"prompt_key": "question", "response_key": "answer"}
    rollout = make_place("4").one(names["MyWorkflow"], {"question": "2+2?", "answer": "4"}, taskset=settings)
    assert (rollout.outcome, rollout.reward, rollout.error) == (Outcome.OK, 1.0, None)
    exec(compile(reward, "trinity.md", "exec"), {})
