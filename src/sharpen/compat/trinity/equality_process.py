"""The process that compares expressions with math-verify, so that one that takes for ever can be ended from outside.

In: lines of JSON, `{"answer": .., "truth": .., "prose": ..}`; in prose the answer is looked for. Out: first the line
`{"ready": true}`, then a line `{"equal": ..}` for each. It ends when its input does. Used by `equality`.
"""

from __future__ import annotations

import json
import logging
import os
import sys


def main() -> None:
    """Answer until the input ends."""
    replies = os.fdopen(os.dup(sys.stdout.fileno()), "w")
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())  # whatever the libraries print does not get among the replies
    logging.disable()
    from math_verify import parse, verify  # the extra `math`

    _write(replies, {"ready": True})
    for line in sys.stdin:
        question = json.loads(line)
        # The time limits of the library are signals, which would not stop a computation inside an extension.
        truth = parse(f"${question['truth']}$", parsing_timeout=None)
        written = question["answer"]
        answer = parse(written if question["prose"] else f"${written}$", parsing_timeout=None)
        equal = bool(truth) and bool(answer) and verify(truth, answer, timeout_seconds=None)
        _write(replies, {"equal": bool(equal)})


def _write(replies: object, content: dict[str, bool]) -> None:
    print(json.dumps(content), file=replies, flush=True)  # type: ignore[call-overload]


if __name__ == "__main__":
    main()
