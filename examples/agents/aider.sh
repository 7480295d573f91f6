#!/usr/bin/env bash
# aider 0.86.2: pip install aider-chat==0.86.2
# Chat completions, through LiteLLM. It reads OPENAI_API_BASE (with /v1) and OPENAI_API_KEY.
# Usage: aider.sh PROMPT [--continue] [further arguments of aider, such as the files to edit]
set -eu
prompt=$1
shift
resume=()
if [ "${1:-}" = --continue ]; then
  resume=(--restore-chat-history)
  shift
fi
export OPENAI_API_BASE=$OPENAI_BASE_URL LITELLM_LOCAL_MODEL_COST_MAP=True
exec aider --model openai/policy --edit-format diff --map-tokens 0 --yes-always --no-git --no-check-update \
  --no-show-model-warnings --no-show-release-notes --analytics-disable --no-detect-urls --no-suggest-shell-commands \
  --no-pretty "${resume[@]}" --message "$prompt" "$@" < /dev/null
