#!/usr/bin/env bash
# Codex CLI 0.169.0: npm install @openai/codex@0.169.0
# Responses. The provider below reads the base URL (with /v1) from its configuration, and OPENAI_API_KEY.
# Usage: codex.sh PROMPT [--continue] [further arguments of codex exec]
set -eu
prompt=$1
shift
resume=()
if [ "${1:-}" = --continue ]; then
  resume=(resume --last)
  shift
fi
# The agent compacts the conversation before the context is full, whose length the proxy knows.
context=$(curl -fsS -H "Authorization: Bearer $OPENAI_API_KEY" "$OPENAI_BASE_URL/models" |
  sed -n 's/.*"max_model_len":\([0-9]*\).*/\1/p')
mkdir -p "$HOME/.codex"
cat > "$HOME/.codex/config.toml" <<CONFIG
model = "policy"
model_provider = "areal"
model_context_window = ${CONTEXT_WINDOW:-${context:-32768}}
check_for_update_on_startup = false
[model_providers.areal]
name = "areal"
base_url = "$OPENAI_BASE_URL"
env_key = "OPENAI_API_KEY"
wire_api = "responses"
[analytics]
enabled = false
CONFIG
# Codex would run commands in a sandbox without network; the sandbox of the run is around all of it.
exec codex exec --skip-git-repo-check --dangerously-bypass-approvals-and-sandbox "$@" "${resume[@]}" "$prompt" < /dev/null
