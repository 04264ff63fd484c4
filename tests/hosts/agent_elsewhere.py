"""An agent as people write one: it plays episodes of two turns at a gateway that it reaches over the network.

    python agent_elsewhere.py BASE_URL KEY_FILE CERTIFICATE EPISODES       prints the seconds of its longest question

Whatever does not answer is asked again, as an SDK does it: the same question gets the same answer.
"""

from __future__ import annotations

import json
import ssl
import sys
import time
import urllib.error
import urllib.request
import uuid
from pathlib import Path
from typing import Any

TRIES_S = 60.0
READ_S = 2.0
TOOK_S: list[float] = []
"""Seconds of each question."""


def ask(url: str, key: str, question: dict[str, Any], trusted: ssl.SSLContext) -> dict[str, Any]:
    begun_s, repeats, asked_as = time.monotonic(), 0, uuid.uuid4().hex
    while True:
        head = {"Authorization": f"Bearer {key}", "Content-Type": "application/json"}
        head |= {"x-stainless-retry-count": str(repeats), "Idempotency-Key": asked_as}
        try:
            request = urllib.request.Request(url, json.dumps(question).encode(), head)
            with urllib.request.urlopen(request, timeout=READ_S, context=trusted) as answer:
                said = json.load(answer)
            TOOK_S.append(time.monotonic() - begun_s)
            return said
        except urllib.error.HTTPError as refused:
            why = f"{refused.code} {refused.read().decode()}"
            if refused.code not in (429, 503):  # no episode may begin now
                raise SystemExit(why) from refused
        except (OSError, ValueError) as error:  # no connection, silence, or an answer that was cut off
            why, repeats = repr(error), repeats + 1
        if time.monotonic() - begun_s > TRIES_S:
            raise SystemExit(f"{url}: no answer within {TRIES_S:g} s: {why}")
        time.sleep(0.1)


def main(base: str, key_file: str, certificate: str, episodes: int) -> None:
    trusted, key = ssl.create_default_context(cafile=certificate), Path(key_file).read_text().strip()
    for number in range(episodes):
        begun = ask(f"{base}/episodes", key, {}, trusted)
        messages = [{"role": "user", "content": begun["task"]["prompt"]}]
        for _ in range(2):
            said = ask(f"{begun['base_url']}/chat/completions", begun["key"], {"messages": messages}, trusted)
            messages += [said["choices"][0]["message"], {"role": "user", "content": "Again."}]
        ask(f"{begun['base_url']}/episodes/end", begun["key"], {"reward": number % 4 / 4}, trusted)
        print(number, flush=True)
    print(max(TOOK_S), flush=True)


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], sys.argv[3], int(sys.argv[4]))
