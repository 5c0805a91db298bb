"""The agent: a program that reads a question from a file and prints the answer. It knows nothing of training."""

import json
import os
import sys
import urllib.request
from pathlib import Path

SYSTEM = "Answer with the number."


def main() -> None:
    """Ask the model that the environment names."""
    question = Path(sys.argv[1]).read_text(encoding="utf-8")
    request = urllib.request.Request(
        f"{os.environ['OPENAI_BASE_URL']}/chat/completions",
        data=json.dumps(
            {
                "model": os.environ["OPENAI_MODEL"],
                "messages": [{"role": "system", "content": SYSTEM}, {"role": "user", "content": question}],
            }
        ).encode(),
        headers={"Authorization": f"Bearer {os.environ['OPENAI_API_KEY']}", "Content-Type": "application/json"},
    )
    with urllib.request.urlopen(request) as reply:
        print(json.load(reply)["choices"][0]["message"]["content"])


if __name__ == "__main__":
    main()
