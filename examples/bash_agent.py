"""An agent with one tool, bash, in the form of mini-swe-agent: each answer has a command, whose output comes back.

It needs the standard library only, so that it runs in any sandbox, as ``{command: [python3, bash_agent.py]}``.
"""

import json
import os
import re
import subprocess
import sys
import urllib.request

MAX_TURNS, MAX_OUTPUT, COMMAND_SECONDS = 20, 4000, 60
SYSTEM = (
    "You work in a shell. Each of your answers has one command in a block:\n```bash\nls\n```\n"
    "You get its output. When you are done, answer with:\n```bash\necho DONE\n```"
)


def ask(messages: list[dict[str, str]]) -> str:
    """Return the model's answer."""
    request = urllib.request.Request(
        os.environ["OPENAI_BASE_URL"] + "/chat/completions",
        data=json.dumps({"model": "policy", "messages": messages}).encode(),
        headers={"Authorization": f"Bearer {os.environ['OPENAI_API_KEY']}", "Content-Type": "application/json"},
    )
    with urllib.request.urlopen(request) as answer:
        text: str | None = json.load(answer)["choices"][0]["message"]["content"]
    return text or ""


def run(command: str) -> str:
    """Run a command in a shell, and return the end of what it printed."""
    try:
        ended = subprocess.run(
            ["bash", "-c", command],
            check=False,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=COMMAND_SECONDS,
        )
    except subprocess.TimeoutExpired:
        return f"The command took longer than {COMMAND_SECONDS} s."
    return f"{(ended.stdout + ended.stderr)[-MAX_OUTPUT:]}\nexit status {ended.returncode}"


messages = [
    {"role": "system", "content": SYSTEM},
    {"role": "user", "content": json.load(sys.stdin)["instruction"]},
]
for _ in range(MAX_TURNS):
    answer = ask(messages)
    command = re.search(r"```(?:bash|sh)?\n(.*?)```", answer, re.DOTALL)
    if command and command[1].strip() == "echo DONE":
        break
    seen = run(command[1]) if command else "Your answer has no command in a block; see above."
    messages += [{"role": "assistant", "content": answer}, {"role": "user", "content": seen}]
