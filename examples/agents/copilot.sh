#!/usr/bin/env bash
# GitHub Copilot CLI 1.0.102: npm install @github/copilot@1.0.102
# Responses. Over chat completions (COPILOT_PROVIDER_WIRE_API=completions) it sends temperature 0, and greedy tokens are
# not trained. The variables below hold the base URL, with /v1, and the key; it needs no account at GitHub.
# Usage: copilot.sh PROMPT [--continue] [further arguments of copilot]
set -eu
prompt=$1
shift
export COPILOT_PROVIDER_BASE_URL="$OPENAI_BASE_URL" COPILOT_PROVIDER_API_KEY="$OPENAI_API_KEY" COPILOT_MODEL="${COPILOT_MODEL:-policy}"
export COPILOT_PROVIDER_WIRE_API=responses COPILOT_OFFLINE=true
exec copilot --prompt "$prompt" --allow-all-tools --no-color "$@"
