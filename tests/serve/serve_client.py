"""An application of a server that learns, and the end of such a server."""

import signal

import httpx
import openai

KEY = "the-key"


class Client:
    """An application: opens sessions, talks in them, and says what they were worth."""

    def __init__(self, url: str) -> None:
        self.url = url.removesuffix("/v1")

    def post(self, path: str, **body):
        reply = httpx.post(f"{self.url}{path}", headers={"authorization": f"Bearer {KEY}"}, json=body, timeout=60)
        assert reply.status_code == 200, reply.text
        return reply.json()

    def talk(self, session, turns: int = 2, content="question") -> list[str]:
        client = openai.OpenAI(base_url=session["base_url"], api_key=session["api_key"], max_retries=0)
        messages, ids = [{"role": "user", "content": content}], []
        for _ in range(turns):
            reply = client.chat.completions.create(model="m", messages=messages, max_tokens=5)
            messages += [reply.choices[0].message.model_dump(exclude_none=True), {"role": "user", "content": "yes"}]
            ids.append(reply.id)
        return ids

    def session(self, task: str, reward: float) -> str:
        session = self.post("/sessions", task_id=task, task={"question": task})
        self.talk(session)
        self.post("/feedback", session=session["id"], reward=reward)
        return session["id"]

    def metric(self, name: str) -> float:
        text = httpx.get(f"{self.url}/metrics", headers={"x-api-key": KEY}).text
        return next(float(line.split()[-1]) for line in text.splitlines() if line.startswith(f"sharpen_{name} "))


def end(process) -> str:
    process.send_signal(signal.SIGINT)
    output, errors = process.communicate(timeout=300)
    assert process.returncode == 0, (output, errors)
    return output
