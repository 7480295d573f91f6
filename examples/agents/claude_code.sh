#!/usr/bin/env bash
# Claude Code 2.1.330: npm install @anthropic-ai/claude-code@2.1.330
# Messages. It reads ANTHROPIC_BASE_URL (without /v1) and ANTHROPIC_API_KEY.
# Usage: claude_code.sh PROMPT [--continue] [further arguments of claude]
set -eu
export DISABLE_TELEMETRY=1 DISABLE_ERROR_REPORTING=1 DISABLE_AUTOUPDATER=1 CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC=1
export IS_SANDBOX=1 # root may skip permissions; run it in a sandbox
exec claude --print "$@" --model policy --dangerously-skip-permissions
