"""Chat templates in the manner of several families, as test data: each family's habits, not its exact text."""

from __future__ import annotations

from areal_actors.models.built_in import CHATML

__all__ = ["BARE", "CHATML", "GEMMA", "GLM", "LLAMA", "MISTRAL", "PHI", "QWEN", "QWEN_THINKING", "SMOLLM"]

SMOLLM = """\
{% for message in messages %}
{% if loop.first and message['role'] != 'system' %}
{{ '<|im_start|>system\\nYou are a helpful AI assistant named SmolLM, trained by Hugging Face<|im_end|>\\n' }}
{%- endif %}
{{- '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>' + '\\n' }}
{%- endfor %}
{% if add_generation_prompt %}
{{- '<|im_start|>assistant\\n' }}
{%- endif %}
"""
"""A default system prompt, any role, no tools."""

_QWEN_HEAD = """\
{%- if tools %}
    {{- '<|im_start|>system\\n' }}
    {%- if messages[0].role == 'system' %}
        {{- messages[0].content + '\\n\\n' }}
    {%- endif %}
    {{- '# Tools\\n<tools>' }}
    {%- for tool in tools %}
        {{- '\\n' ~ (tool | tojson) }}
    {%- endfor %}
    {{- '\\n</tools>\\nWrite <tool_call>\\n{"name": ..., "arguments": ...}\\n</tool_call><|im_end|>\\n' }}
{%- elif messages[0].role == 'system' %}
    {{- '<|im_start|>system\\n' + messages[0].content + '<|im_end|>\\n' }}
{%- endif %}
{%- set ns = namespace(last_question=messages | length - 1, is_found=false) %}
{%- for message in messages[::-1] %}
    {%- set index = (messages | length - 1) - loop.index0 %}
    {%- if not ns.is_found and message.role == 'user' %}
        {%- set ns.is_found = true %}
        {%- set ns.last_question = index %}
    {%- endif %}
{%- endfor %}
{%- for message in messages %}
    {%- if message.role == 'user' or (message.role == 'system' and not loop.first) %}
        {{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>\\n' }}
    {%- elif message.role == 'assistant' %}
        {{- '<|im_start|>assistant\\n' }}
        {%- if loop.index0 > ns.last_question and (loop.last or message.reasoning_content) %}
            {{- '<think>\\n' ~ (message.reasoning_content or '').strip('\\n') ~ '\\n</think>\\n\\n' }}
        {%- endif %}
        {{- message.content }}
        {%- for call in message.tool_calls or [] %}
            {%- if not loop.first or message.content %}{{ '\\n' }}{% endif %}
            {{- '<tool_call>\\n{"name": "' ~ call.function.name ~ '", "arguments": ' }}
            {{- (call.function.arguments | tojson) ~ '}\\n</tool_call>' }}
        {%- endfor %}
        {{- '<|im_end|>\\n' }}
    {%- elif message.role == 'tool' %}
        {%- if loop.first or messages[loop.index0 - 1].role != 'tool' %}
            {{- '<|im_start|>user' }}
        {%- endif %}
        {{- '\\n<tool_response>\\n' + message.content + '\\n</tool_response>' }}
        {%- if loop.last or messages[loop.index0 + 1].role != 'tool' %}
            {{- '<|im_end|>\\n' }}
        {%- endif %}
    {%- endif %}
{%- endfor %}
"""

QWEN = (
    _QWEN_HEAD
    + """\
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\\n' }}
    {%- if enable_thinking is defined and not enable_thinking %}
        {{- '<think>\\n\\n</think>\\n\\n' }}
    {%- endif %}
{%- endif %}
"""
)
"""Tools and calls as JSON, results joined in one user turn, thinking dropped when the next question comes."""

QWEN_THINKING = (
    _QWEN_HEAD
    + """\
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\\n<think>\\n' }}
{%- endif %}
"""
)
"""The same, but the prompt itself opens the thinking."""

LLAMA = """\
{{- bos_token }}
{%- set offset = 0 %}
{%- if messages[0]['role'] == 'system' %}
    {%- set system = messages[0]['content'] | trim %}
    {%- set messages = messages[1:] %}
{%- else %}
    {%- set system = '' %}
{%- endif %}
{{- '<|start|>system<|end_header|>\\n\\nToday: ' + strftime_now('%d %b %Y') + '\\n\\n' + system + '<|eot|>' }}
{%- if tools %}
    {{- '<|start|>user<|end_header|>\\n\\nCall functions as {"name": ..., "parameters": ...}.\\n' }}
    {%- for tool in tools %}{{ tool | tojson(indent=4) }}{{ '\\n' }}{% endfor %}
    {{- messages[0]['content'] | trim + '<|eot|>' }}
    {%- set messages = messages[1:] %}
{%- endif %}
{%- for message in messages %}
    {%- if message.tool_calls %}
        {%- if message.tool_calls | length != 1 %}{{ raise_exception('one call at a time') }}{% endif %}
        {%- set function = message.tool_calls[0].function %}
        {{- '<|start|>assistant<|end_header|>\\n\\n{"name": "' + function.name + '", "parameters": ' }}
        {{- function.arguments | tojson + '}<|eot|>' }}
    {%- elif message.role == 'tool' %}
        {{- '<|start|>ipython<|end_header|>\\n\\n' + message.content + '<|eot|>' }}
    {%- else %}
        {{- '<|start|>' + message['role'] + '<|end_header|>\\n\\n' + message['content'] | trim + '<|eot|>' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|start|>assistant<|end_header|>\\n\\n' }}{% endif %}
"""
"""A date, tools in the first question, trimmed contents, one call at a time."""

MISTRAL = """\
{%- if messages[0].role == 'system' %}
    {%- set system = messages[0].content %}
    {%- set turns = messages[1:] %}
{%- else %}
    {%- set turns = messages %}
{%- endif %}
{%- set questions = turns | selectattr('role', 'equalto', 'user') | list %}
{%- set ns = namespace(index=0) %}
{%- for message in turns %}
    {%- if message.role == 'user' or (message.role == 'assistant' and not message.tool_calls) %}
        {%- if (message.role == 'user') != (ns.index % 2 == 0) %}
            {{- raise_exception('user and assistant must alternate') }}
        {%- endif %}
        {%- set ns.index = ns.index + 1 %}
    {%- endif %}
{%- endfor %}
{{- bos_token }}
{%- for message in turns %}
    {%- if message.role == 'user' %}
        {%- if tools and message == questions[-1] %}{{ '[TOOLS]' ~ (tools | tojson) ~ '[/TOOLS]' }}{% endif %}
        {{- '[INST]' }}
        {%- if loop.last and system is defined %}{{ system + '\\n\\n' }}{% endif %}
        {{- message.content + '[/INST]' }}
    {%- elif message.tool_calls %}
        {{- '[CALLS][' }}
        {%- for call in message.tool_calls %}
            {%- if call.id | length != 9 %}{{ raise_exception('call ids have nine characters') }}{% endif %}
            {{- '{"name": "' ~ call.function.name ~ '", "arguments": ' ~ (call.function.arguments | tojson) ~ '}' }}
            {%- if not loop.last %}{{ ', ' }}{% endif %}
        {%- endfor %}
        {{- ']' + eos_token }}
    {%- elif message.role == 'assistant' %}
        {{- ' ' + message.content + eos_token }}
    {%- elif message.role == 'tool' %}
        {{- '[RESULT]' + message.content + '[/RESULT]' }}
    {%- else %}
        {{- raise_exception('role ' + message.role + ' is not known') }}
    {%- endif %}
{%- endfor %}
"""
"""Strict alternation; system prompt and tools move to the last question."""

GEMMA = """\
{{- bos_token }}
{%- if messages[0]['role'] == 'system' %}{{ raise_exception('no system role') }}{% endif %}
{%- for message in messages %}
    {%- set is_users = message['role'] == 'user' %}
    {%- if is_users != (loop.index0 % 2 == 0) %}{{ raise_exception('roles must alternate') }}{% endif %}
    {%- set role = 'model' if message['role'] == 'assistant' else message['role'] %}
    {{- '<start_of_turn>' + role + '\\n' + message['content'] | trim + '<end_of_turn>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<start_of_turn>model\\n' }}{% endif %}
"""
"""No system role, no tools, strict alternation, another name for the assistant."""

PHI = """\
{%- for message in messages %}{{ '<|' + message['role'] + '|>\\n' + message['content'] + '<|end|>\\n' }}{% endfor %}
{%- if add_generation_prompt %}{{ '<|assistant|>\\n' }}{% endif %}
"""
"""Roles become markup; the end of turn swallows the line break behind it (``rstrip``)."""

GLM = """\
{%- for message in messages %}{{ '<|' + message['role'] + '|>\\n' + message['content'] }}{% endfor %}
{%- if add_generation_prompt %}{{ '<|assistant|>\\n' }}{% endif %}
"""
"""Nothing ends a turn but the beginning of the next."""

BARE = """\
{%- for message in messages %}{{ message.role + ': ' + message.content + '\\n\\n' }}{% endfor %}
{%- if add_generation_prompt %}{{ 'assistant:' }}{% endif %}
"""
"""No special tokens at all."""

MORE_SPECIAL = (
    "<|start|>",
    "<|end_header|>",
    "<|eot|>",
    "[INST]",
    "[/INST]",
    "[TOOLS]",
    "[/TOOLS]",
    "[CALLS]",
    "[RESULT]",
    "[/RESULT]",
    "<start_of_turn>",
    "<end_of_turn>",
    "<|user|>",
    "<|assistant|>",
    "<|system|>",
    "<|end|>",
)
"""Special tokens of these families."""
