"""The grader of `sandbox_agent.py`: it runs in a sandbox that has the agent's files, and prints the reward."""

from pathlib import Path

answer = Path("answer.txt")
text = answer.read_text(encoding="utf-8", errors="replace") if answer.exists() else ""
print(sum(character in "0123456789" for character in text) / max(len(text), 1))
