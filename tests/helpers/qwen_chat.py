"""A chat as a Qwen3 model sees and writes it: template, calls, and limits that it fits in."""

from compiled_engine.request import ModelLimits

LIMITS = ModelLimits(max_model_len=16_384, vocab_size=258, max_total_tokens=65_536)
# A small template in the manner of Qwen3's.
QWEN = """{%- if tools %}<tools>
{%- for tool in tools %}{{ tool | tojson }}{% endfor %}</tools>{% endif %}
{%- for m in messages %}[{{ m.role }}]
{%- if m.reasoning_content %}<think>{{ m.reasoning_content }}</think>{% endif %}{{ m.content }}
{%- for call in m.tool_calls or [] %}<tool_call>{{ call.function | tojson }}</tool_call>{% endfor %}
{%- endfor %}
{%- if add_generation_prompt %}[assistant]
{%- if enable_thinking is defined and not enable_thinking %}<think>\n\n</think>\n\n{% endif %}
{%- if starts_thinking is defined %}<think>\n{% endif %}{% endif %}"""
CALL = '<tool_call>\n{"name": "f", "arguments": {"a": 1}}\n</tool_call>'
NOW = '<tool_call>\n{"name": "now", "arguments": {}}\n</tool_call>'
