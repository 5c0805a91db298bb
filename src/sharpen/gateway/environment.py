"""The environment variables from which agents learn their model: where it is, its name, and the key.

In: a base URL, a key, a model's name. Out: the variables, for a command that is started for one rollout.
"""

from __future__ import annotations

from urllib.parse import urlsplit

OPENAI_URLS = ("OPENAI_BASE_URL", "OPENAI_API_BASE")
"""`OPENAI_API_BASE` is what older clients, and LiteLLM, read."""
ANTHROPIC_MODELS = (
    "ANTHROPIC_MODEL",
    "ANTHROPIC_SMALL_FAST_MODEL",
    "ANTHROPIC_DEFAULT_HAIKU_MODEL",
    "ANTHROPIC_DEFAULT_SONNET_MODEL",
    "ANTHROPIC_DEFAULT_OPUS_MODEL",
    "CLAUDE_CODE_SUBAGENT_MODEL",
)
"""Claude Code asks for models by several names, for side calls and sub-agents too: all of them are the one model."""


def environment_of(base_url: str, key: str, name: str) -> dict[str, str]:
    """Return the variables for a model at `base_url` (which ends in `/v1`).

    Anthropic's clients add `/v1` themselves. Their key is `ANTHROPIC_API_KEY`, which all of them read;
    `ANTHROPIC_AUTH_TOKEN` is left out, since Claude Code complains if it finds both. The host is named in `NO_PROXY`,
    so that a proxy in the environment does not get the requests.
    """
    host = urlsplit(base_url).hostname or ""
    return {
        **dict.fromkeys(OPENAI_URLS, base_url),
        "OPENAI_API_KEY": key,
        "OPENAI_MODEL": name,
        "ANTHROPIC_BASE_URL": base_url.removesuffix("/v1"),
        "ANTHROPIC_API_KEY": key,
        **dict.fromkeys(ANTHROPIC_MODELS, name),
        "CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC": "1",
        "NO_PROXY": host,
        "no_proxy": host,
    }
