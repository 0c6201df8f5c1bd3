"""Chat templates written for the tests, in the prompt formats of models whose own template is not repeated here."""

LLAMA2 = """{#- Questions in brackets, the system prompt in the first of them; a begin token before each. -#}
{%- set system = messages[0].content if messages[0].role == 'system' else none -%}
{%- for message in (messages[1:] if system is not none else messages) -%}
    {%- if (message.role == 'user') != (loop.index0 % 2 == 0) -%}
        {{- raise_exception('Conversation roles must alternate user and assistant, got ' ~ message.role) -}}
    {%- endif -%}
    {%- if message.role == 'user' -%}
        {%- set before = '<<SYS>>\\n' ~ system ~ '\\n<</SYS>>\\n\\n' if loop.first and system is not none else '' -%}
        {{- bos_token ~ '[INST] ' ~ before ~ message.content | trim ~ ' [/INST]' -}}
    {%- elif message.role == 'assistant' -%}
        {{- ' ' ~ message.content | trim ~ ' ' ~ eos_token -}}
    {%- endif -%}
{%- endfor -%}"""

MISTRAL = """{#- Instructions in brackets; the tools and the system prompt stand before the last question. -#}
{%- set turns = messages[1:] if messages[0].role == 'system' else messages -%}
{%- set questions = turns | selectattr('role', 'equalto', 'user') | list -%}
{%- set state = namespace(position=0) -%}
{%- for turn in turns if turn.role in ['user', 'assistant'] and not turn.get('tool_calls') -%}
    {%- if (turn.role == 'user') == (state.position % 2 == 1) -%}
        {{- raise_exception('Conversation roles must alternate user and assistant, got ' ~ turn.role) -}}
    {%- endif -%}
    {%- set state.position = state.position + 1 -%}
{%- endfor -%}
{{- bos_token -}}
{%- for turn in turns -%}
    {%- if turn.role == 'user' -%}
        {%- if tools is defined and tools is not none and turn == questions | last -%}
            {{- '[AVAILABLE_TOOLS]' ~ (tools | tojson) ~ '[/AVAILABLE_TOOLS]' -}}
        {%- endif -%}
        {{- '[INST]' -}}
        {%- if loop.last and messages[0].role == 'system' -%}{{- messages[0].content + '\\n\\n' -}}{%- endif -%}
        {{- turn['content'] + '[/INST]' -}}
    {%- elif turn.tool_calls is defined and turn.tool_calls is not none -%}
        {%- set calls = namespace(texts=[]) -%}
        {%- for tool_call in turn.tool_calls -%}
            {%- if tool_call.id is undefined or tool_call.id | length != 9 -%}
                {{- raise_exception('Tool call ids must have 9 characters') -}}
            {%- endif -%}
            {%- set text = tool_call.function | tojson -%}
            {%- set calls.texts = calls.texts + [text[:-1] ~ ', "id": "' ~ tool_call.id ~ '"}'] -%}
        {%- endfor -%}
        {{- '[TOOL_CALLS][' ~ calls.texts | join(', ') ~ ']' ~ eos_token -}}
    {%- elif turn.role == 'tool' -%}
        {%- set result = '{"content": %s, "call_id": "%s"}' % (turn.content | string, turn.tool_call_id) -%}
        {{- '[TOOL_RESULTS]' ~ result ~ '[/TOOL_RESULTS]' -}}
    {%- elif turn.role == 'assistant' -%}
        {{- turn.content | trim + eos_token -}}
    {%- else -%}
        {{- raise_exception('Unknown role ' + turn.role) -}}
    {%- endif -%}
{%- endfor -%}"""

SMOLLM3 = """{#- Metadata with date and reasoning mode, which the system prompt may switch; answers are marked. -#}
{%- if enable_thinking is not defined %}{% set enable_thinking = true %}{% endif -%}
{%- set ns = namespace(mode='/think' if enable_thinking else '/no_think', custom='') -%}
{%- if messages[0].role == 'system' -%}
    {%- for switch in ['/no_think', '/think'] if switch in messages[0].content -%}
        {%- set ns.mode = switch -%}
        {%- break -%}
    {%- endfor -%}
    {%- set ns.custom = messages[0].content.replace('/no_think', '').replace('/think', '').rstrip() -%}
{%- endif -%}
{{- '<|im_start|>system\\n' -}}
{%- if '/system_override' in ns.custom -%}
    {{- ns.custom.replace('/system_override', '').rstrip() + '<|im_end|>\\n' -}}
{%- else -%}
    {{- '## Metadata\\n\\nKnowledge Cutoff Date: June 2025\\nToday Date: ' + strftime_now('%d %B %Y') + '\\n' -}}
    {{- 'Reasoning Mode: ' + ns.mode + '\\n\\n## Custom Instructions\\n\\n' -}}
    {{- (ns.custom or 'You are a helpful AI assistant.') + '\\n\\n' -}}
    {%- set offered = (xml_tools | default([])) or (tools or []) -%}
    {%- if offered or python_tools is defined -%}
        {{- '### Tools\\n\\n' -}}
        {%- for tool in offered -%}
            {%- if loop.first -%}{{- '<tools>\\n' -}}{%- endif -%}
            {{- (tool | string) + '\\n' -}}
            {%- if loop.last -%}{{- '</tools>\\n' -}}{%- endif -%}
        {%- endfor -%}
        {%- if python_tools is defined and python_tools is iterable -%}
            {{- '<code>\\n' ~ python_tools | join('\\n') | indent(2, first=true) ~ '\\n</code>\\n' -}}
        {%- endif -%}
    {%- endif -%}
    {{- '<|im_end|>\\n' -}}
{%- endif -%}
{%- for message in messages -%}
    {%- if message.role == 'system' -%}{%- continue -%}{%- endif -%}
    {%- set content = message.content if message.content is string else '' -%}
    {%- if message.role == 'assistant' -%}
        {%- generation -%}
        {%- if ns.mode == '/think' -%}
            {{- '<|im_start|>assistant\\n' + content.lstrip('\\n') + '<|im_end|>\\n' -}}
        {%- else -%}
            {{- '<|im_start|>assistant\\n<think>\\n\\n</think>\\n' + content.lstrip('\\n') + '<|im_end|>\\n' -}}
        {%- endif -%}
        {%- endgeneration -%}
    {%- else -%}
        {%- set role = 'user' if message.role == 'tool' else message.role -%}
        {{- '<|im_start|>' + role + '\\n' + content + '<|im_end|>\\n' -}}
    {%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}
    {{- '<|im_start|>assistant\\n' + ('' if ns.mode == '/think' else '<think>\\n\\n</think>\\n') -}}
{%- endif -%}"""
