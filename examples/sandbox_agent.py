"""An agent that runs in a sandbox: it reads its problem, asks the model, and leaves the answer in a file."""

import json
import os
import sys
import urllib.request
from pathlib import Path

problem = json.load(sys.stdin)
question = problem.get("question") or problem["instruction"]
request = urllib.request.Request(
    os.environ["OPENAI_BASE_URL"] + "/chat/completions",
    data=json.dumps(
        {"model": "policy", "max_tokens": 12, "messages": [{"role": "user", "content": question}]}
    ).encode(),
    headers={"Authorization": f"Bearer {os.environ['OPENAI_API_KEY']}", "Content-Type": "application/json"},
)
with urllib.request.urlopen(request) as answer:
    text = json.load(answer)["choices"][0]["message"]["content"]
Path("answer.txt").write_text(text or "", encoding="utf-8")
