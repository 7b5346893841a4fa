"""YAML for configuration files. A file of its own: importing PyYAML takes longer than reading a TOML file."""

from __future__ import annotations

from typing import Any

import yaml


def load(text: str) -> object:
    """Return the content of a YAML document. Raises `ValueError` for text that is no YAML or has a key twice: in one
    line, with the place."""
    try:
        return yaml.load(text, Loader=_StrictLoader)  # a safe loader
    except yaml.MarkedYAMLError as error:
        raise ValueError(_sentence(error)) from None
    except yaml.reader.ReaderError as error:
        before = text[: error.position]
        column = len(before) - before.rfind("\n")
        raise ValueError(
            f"line {before.count(chr(10)) + 1}, column {column}: a YAML text has no character #x{error.character:04x}"
        ) from None
    except RecursionError:
        raise ValueError("it nests too deep") from None
    except (AttributeError, KeyError, TypeError, ValueError):  # a collection with an explicit tag: `!!set 1`
        raise ValueError("a value is not what its tag (!!) says") from None


def _sentence(error: yaml.MarkedYAMLError) -> str:
    mark = error.problem_mark or error.context_mark
    place = f"line {mark.line + 1}, column {mark.column + 1}: " if mark is not None else ""
    return place + " ".join((error.problem or "this is no YAML").split())


class _StrictLoader(yaml.SafeLoader):
    """A loader that refuses a key that is there twice, as TOML does, and does not take the last one."""

    def construct_object(self, node: yaml.Node, deep: bool = False) -> Any:
        try:
            return super().construct_object(node, deep)
        except (AttributeError, KeyError, TypeError, ValueError):  # `!!bool x`, `2026-13-01`
            kind = node.tag.rpartition(":")[2]
            raise yaml.constructor.ConstructorError(
                None, None, f"the value is no {kind}", node.start_mark
            ) from None

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        keys: set[str] = set()
        for key, _ in node.value:
            if not isinstance(key, yaml.ScalarNode):
                raise yaml.constructor.ConstructorError(
                    None, None, "a list or a mapping is no key", key.start_mark
                )
            if key.value in keys:
                raise yaml.constructor.ConstructorError(
                    None, None, f"{key.value} is there twice", key.start_mark
                )
            keys.add(key.value)
        return super().construct_mapping(node, deep)
