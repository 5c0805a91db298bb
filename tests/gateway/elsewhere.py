"""An agent on another network than the gateway, as a container's is. Run as a script:

    python elsewhere.py namespaces    in a network namespace: makes a second one, joined by a pair of veth
    python elsewhere.py here          without namespaces: the second loopback address stands for the other network

It prints a JSON object with what the agent got.
"""

from __future__ import annotations

import json
import subprocess
import sys
import time
from typing import Any

from scripted import ScriptedEngine, ServingLoop, toy_tokenizer

from sharpen.config.sections import GatewayConfig
from sharpen.errors import ConfigError
from sharpen.gateway.gateway import Gateway

CURL = (
    'curl --silent --show-error --max-time 10 "$OPENAI_BASE_URL/chat/completions" '
    '--header "Authorization: Bearer $OPENAI_API_KEY" '
    """--json '{"model": "toy", "messages": [{"role": "user", "content": "hello"}]}'"""
)


def make_networks() -> list[str]:
    """Make the second namespace; return the command line that enters it."""
    for text in (
        "ip link set lo up",
        "ip link add veth0 type veth peer name veth1",
        "ip addr add 10.99.0.1/24 dev veth0",
        "ip link set veth0 up",
    ):
        subprocess.run(text.split(), check=True)
    nothing = subprocess.DEVNULL  # it outlives this script: a pipe that it holds would keep the test waiting
    other = subprocess.Popen(["unshare", "--net", "sleep", "60"], stdout=nothing, stderr=nothing)
    time.sleep(0.5)
    enter = ["nsenter", f"--net=/proc/{other.pid}/ns/net"]
    subprocess.run(["ip", "link", "set", "veth1", "netns", str(other.pid)], check=True)
    for text in ("ip addr add 10.99.0.2/24 dev veth1", "ip link set veth1 up", "ip link set lo up"):
        subprocess.run([*enter, *text.split()], check=True)
    return enter


def ask(enter: list[str], environment: dict[str, str]) -> str:
    """What an agent there is answered, or what its client says."""
    shown = subprocess.run([*enter, "sh", "-c", CURL], env=environment, capture_output=True, text=True)
    return shown.stdout or shown.stderr


def main(how: str) -> dict[str, Any]:
    """Ask from the other network: a gateway that listens there, with its key and without, and one that does not."""
    enter, host = (make_networks(), "10.99.0.1") if how == "namespaces" else ([], "127.0.0.2")
    serving, tokenizer = ServingLoop(), toy_tokenizer()
    engine = ScriptedEngine(tokenizer, lambda request: "hi", max_model_len=4096)
    opened = Gateway(engine, tokenizer, model_name="toy", loop=serving.loop, listen=GatewayConfig(host=host))
    closed = Gateway(engine, tokenizer, model_name="toy", loop=serving.loop)
    session, inside = opened.open("g/0", noise_seed=1), closed.open("g/1", noise_seed=1)
    environment = {"PATH": "/usr/bin:/bin", **session.model.environment(host)}
    found: dict[str, Any] = {
        "answer": ask(enter, environment),
        "without a key": ask(enter, {**environment, "OPENAI_API_KEY": "none"}),
        "loopback": ask(enter, {"PATH": "/usr/bin:/bin", **inside.model.environment()}) if enter else None,
        "calls": [len(session.close()), len(inside.close())],
    }
    try:
        inside.model.environment(host)
    except ConfigError as error:
        found["refused"] = str(error)
    for gateway in (opened, closed):
        serving.run(gateway.close())
    serving.stop()
    return found


if __name__ == "__main__":
    print(json.dumps(main(sys.argv[1])))
