"""YAML for configuration files. A file of its own: importing PyYAML takes longer than reading a TOML file."""

from __future__ import annotations

from typing import Any

import yaml


def load(text: str) -> object:
    """The content of a YAML document. Raises `ValueError`, in one line, for text that is no YAML or has a key twice."""
    try:
        return yaml.load(text, Loader=_StrictLoader)  # a safe loader
    except (yaml.YAMLError, ValueError) as error:
        raise ValueError(" ".join(str(error).split())) from None
    except RecursionError:
        raise ValueError("it nests too deep") from None
    except (AttributeError, KeyError, TypeError):
        # PyYAML's constructors of a value with an explicit tag: `!!bool x`, `!!timestamp 1`.
        raise ValueError("a value is not what its tag (!!) says") from None


class _StrictLoader(yaml.SafeLoader):
    """YAML as TOML has it: a key that is there twice is a mistake, not the last one wins."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        seen: set[str] = set()
        for key, _ in node.value:
            if not isinstance(key, yaml.ScalarNode):
                continue  # a list as a key is refused further on, as an unknown one
            if key.value in seen:
                raise yaml.constructor.ConstructorError(
                    None, None, f"{key.value} is there twice", key.start_mark
                )
            seen.add(key.value)
        return super().construct_mapping(node, deep)
