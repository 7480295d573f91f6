"""Reward the count, and say whether there was one. The text is the verifier's: the agent may have changed its own."""

import json
import re
from pathlib import Path

text = (Path(__file__).parent / "text.txt").read_text(encoding="utf-8")
expected = len(re.findall(r"\bactor\b", text, re.IGNORECASE))
written = Path("/app/count.txt")
answer = written.read_text(encoding="utf-8", errors="replace").strip() if written.is_file() else ""
rewards = {"reward": float(answer == str(expected)), "has_answered": float(bool(answer))}
Path("/logs/verifier/reward.json").write_text(json.dumps(rewards), encoding="utf-8")
