"""JSON and YAML of the commands: what a terminal may act on is escaped, and nothing is lost."""

from __future__ import annotations

import json

import yaml

from gpuactors.cli.formats import either


def test_json_and_yaml_control_no_terminal_and_lose_nothing() -> None:
    """An encoder escapes what JSON must: neither the C1 controls, nor the marks of direction."""
    odd = {"command": "\x1b[2J\x9b31m\x7f\u202e\u2028\U000e0001\ud800 é 漢", "plain": "\u202etxt"}
    as_json = json.dumps(odd, indent=2, ensure_ascii=False)
    for shown in (either("json", as_json), either("yaml", as_json)):
        assert [line for line in shown.split("\n") if not line.isprintable()] == []
    assert either("yaml", json.dumps(odd)) == either("yaml", as_json), "however it was escaped"
    assert json.loads(either("json", as_json)) == odd
    assert "é 漢" in either("json", as_json)
    assert yaml.safe_load(either("yaml", json.dumps({"plain": "\u202etxt"}))) == {"plain": "\u202etxt"}
    assert either("json", '{"a": "é"}') == '{"a": "é"}'
