"""A chat with a task's tools in this process: what verifiers' `null` harness does, without a program for each rollout.

In: a task's messages and the addresses of its tool servers. Out: its calls to the endpoint that verifiers gives it,
which passes them on to the gateway. Imported where verifiers is installed alone.
"""

from __future__ import annotations

import contextlib
import sys
from typing import Any

import httpx
import openai
import verifiers.v1 as vf
from verifiers.v1.dialects.chat import message_to_wire
from verifiers.v1.harnesses.utils.core import gate_tool_call
from verifiers.v1.harnesses.utils.mcp import call_mcp, connect_mcp

from sharpen.agent.environments.games import arguments_of

ID = "sharpen_chat"
"""Its name among harnesses, which verifiers imports as a module."""


class ChatConfig(vf.HarnessConfig):  # type: ignore[misc]
    """It has no settings of its own."""


class ChatHarness(vf.Harness[ChatConfig]):  # type: ignore[misc]
    """Asks the model until it calls no tool."""

    APPENDS_SYSTEM_PROMPT = True
    SUPPORTS_MCP = True
    SUPPORTS_RESUME = True
    SUPPORTS_TOOL_INTERCEPTION = True
    EXECUTES_CODE = False
    NEEDS_CONTAINER = False

    async def launch(
        self,
        ctx: Any,
        trace: Any,
        runtime: Any,
        endpoint: str,
        secret: str,
        mcp_urls: dict[str, str],
        data: Any,
        tool_interception_url: str | None = None,
    ) -> Any:
        """Talk until an answer without a call of a tool, or until the context is full."""
        system, prompt = self.resolve_prompt(data)
        messages: list[Any] = [{"role": "system", "content": system}] if system else []
        if isinstance(prompt, str):
            messages.append({"role": "user", "content": prompt})
        else:
            messages += [message_to_wire(message) for message in prompt or ()]
        async with contextlib.AsyncExitStack() as stack:
            client = await stack.enter_async_context(
                openai.AsyncOpenAI(base_url=endpoint, api_key=secret, max_retries=0, timeout=None)
            )
            gate = await stack.enter_async_context(httpx.AsyncClient(timeout=None))
            servers = {name: {"url": url, "timeout": self.config.tool_timeout} for name, url in mcp_urls.items()}
            tools, dispatch, connections = await connect_mcp({"mcpServers": servers}, stack)
            options = {"tools": tools} if tools else {}
            while True:
                try:
                    reply = await client.chat.completions.create(model=ctx.model, messages=messages, **options)
                except openai.BadRequestError:  # the context is full: the gateway has recorded it
                    break
                message = reply.choices[0].message
                messages.append(message.model_dump(exclude_none=True))
                if not message.tool_calls:
                    break
                for call in message.tool_calls:
                    content = None
                    if tool_interception_url is not None:
                        decision = await gate_tool_call(gate, tool_interception_url, secret, call)
                        content = decision["message"] if decision["action"] == "deny" else None
                    if isinstance(content, dict):
                        messages.append(content)
                        continue
                    content = content or await _result(call, dispatch, connections)
                    messages.append({"role": "tool", "tool_call_id": call.id, "content": content})
        return vf.ProgramResult(exit_code=0, stdout="", stderr="")


async def _result(call: Any, dispatch: Any, connections: Any) -> Any:
    """Return what a tool says, also to arguments that are none."""
    name, arguments = call.function.name, arguments_of(call)
    if isinstance(arguments, str):
        return arguments
    if name not in dispatch:
        return f"error: there is no tool {name!r}"
    return await call_mcp(connections, dispatch, name, arguments)


__all__ = ["ChatHarness"]
sys.modules[ID] = sys.modules[__name__]  # it is imported by this name
