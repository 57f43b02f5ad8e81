"""An agent that plays a game of two turns with the policy in training: `python examples/agent/second_try.py`.

The policy is told to write digits backwards. When it is wrong it is told so, and may try once more. Right at once pays
1, right the second time 0.5. The agent is an ordinary program with an ordinary client (`pip install openai`): it asks
for a task, talks, and says what the conversation was worth.

    sextet up
    python examples/demo/make_model.py models/demo
    sextet openai &                                      # one URL before all rollouts
    python examples/agent/second_try.py &
    sextet run examples/agent/second_try.yaml
"""

import argparse
import os
import sys
import threading
import time
from pathlib import Path
from typing import Any

import httpx
from openai import OpenAI, OpenAIError


def play(client: OpenAI, task: dict[str, Any]) -> float:
    """The conversation; what it is worth."""
    messages = list(task["prompt"])
    for worth in (1.0, 0.5):
        answer = client.chat.completions.create(model="policy", messages=messages)
        said = answer.choices[0].message.content or ""
        if said.split() == task["ground_truth"].split():
            return worth
        messages += [{"role": "assistant", "content": said}, *task["prompt"]]
    return 0.0


def work(url: str, token: str, over: threading.Event) -> None:
    """Plays one task after another; waits where nobody serves, and leaves a conversation whose replica died."""
    headers = {"authorization": f"Bearer {token}"}
    with httpx.Client(base_url=url, headers=headers, timeout=60) as http:
        while not over.is_set():
            try:
                play_next(http, url, token)
            except (httpx.HTTPError, OpenAIError) as error:
                print(f"{type(error).__name__}: {error}", file=sys.stderr)
                over.wait(1.0)


def play_next(http: httpx.Client, url: str, token: str) -> None:
    """Claims a task and plays it; returns without one after a while."""
    claimed = http.post("/v1/sessions/claim", json={"seconds": 5}).raise_for_status()
    if claimed.status_code == 204:
        return
    session = claimed.json()
    with OpenAI(base_url=f"{url}{session['base_url']}", api_key=token) as client:
        reward = play(client, session["task"])
    http.post(f"/v1/sessions/{session['id']}/reward", json={"reward": reward}).raise_for_status()


def token() -> str:
    """What `sextet up` wrote, unless SEXTET_TOKEN says otherwise."""
    return os.environ.get("SEXTET_TOKEN") or (Path.home() / ".sextet/token").read_text().strip()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--url", default="http://127.0.0.1:8000")
    parser.add_argument("--agents", type=int, default=16, help="conversations at the same time")
    given = parser.parse_args()
    over = threading.Event()
    agents = [threading.Thread(target=work, args=(given.url, token(), over)) for _ in range(given.agents)]
    for agent in agents:
        agent.start()
    try:
        while any(agent.is_alive() for agent in agents):
            time.sleep(0.5)
    except KeyboardInterrupt:
        over.set()
        sys.exit(130)


if __name__ == "__main__":
    main()
