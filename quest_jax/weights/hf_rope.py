"""The rotary embedding of a Hugging Face config, in the spelling of transformers 4 and of 5.

Version 4 has ``rope_theta`` and ``rope_scaling`` (with ``type`` or ``rope_type``), version 5 one dict
``rope_parameters``. As in transformers: what the dict says wins over the top level, and the trained length that is
not given is ``max_position_embeddings``.
"""

from collections.abc import Mapping
from typing import Any, cast

from quest_jax.models.config import RopeConfig, RopeKind
from quest_jax.weights.fields import Fields, shown

ROPE_KEYS = (
    "rope_theta", "rope_scaling", "rope_parameters", "original_max_position_embeddings", "partial_rotary_factor",
    "rope_local_base_freq",
)  # fmt: skip
"""Keys of a config that :func:`parse_ropes` reads."""

_DEFAULT_THETA = 10000.0
_COMMON = {"rope_type", "type", "rope_theta", "partial_rotary_factor"}
_USED = {
    "default": set(),
    "linear": {"factor"},
    "dynamic": {"factor"},
    "yarn": {"factor", "attention_factor", "beta_fast", "beta_slow", "truncate", "mscale", "mscale_all_dim"},
    "llama3": {"factor", "low_freq_factor", "high_freq_factor"},
    "longrope": {"factor", "attention_factor", "short_factor", "long_factor"},
}
_OLD_NAMES = {"su": "longrope"}
# The trained length is read by yarn and llama3, checked for dynamic and only informative for linear; the mark
# ``finetuned`` of early YaRN checkpoints never had an effect.
_ALLOWED = {kind: used | {"original_max_position_embeddings", "finetuned"} for kind, used in _USED.items()}


def parse_ropes(
    config: Mapping[str, Any], max_positions: int, where: str, head_dim: int | None = None
) -> tuple[RopeConfig, RopeConfig | None]:
    """Reads the RoPE of a config, and that of its layers with a window where those have one of their own (Gemma 3).

    Arguments and errors as for :func:`parse_rope`.
    """
    new = config.get("rope_parameters")
    if isinstance(new, dict) and set(new) == {"full_attention", "sliding_attention"}:
        whole, local = (
            parse_rope({**config, "rope_parameters": new[kind] or {}}, max_positions, where, head_dim)
            for kind in ("full_attention", "sliding_attention")
        )
        return whole, local
    rope = parse_rope(config, max_positions, where, head_dim)
    theta = Fields(config, where).number("rope_local_base_freq", None)
    return rope, None if theta is None else RopeConfig(theta=theta)


def parse_rope(config: Mapping[str, Any], max_positions: int, where: str, head_dim: int | None = None) -> RopeConfig:
    """Reads the RoPE of a config.

    Args:
      config: the whole ``config.json``.
      max_positions: its ``max_position_embeddings``.
      head_dim: channels of a head, in a family where a part of them may turn; None where all must.
      where: the file, for errors.

    Raises:
      NotImplementedError: an unknown RoPE type, or a partial rotation where the family has none.
      ValueError: a value out of range, a missing or unknown key, or two that contradict each other.
    """
    values = _chosen(config, where)
    fields = Fields(values, f"{where}: RoPE")
    kind = fields.text("rope_type", fields.text("type", "default"))
    kind = _OLD_NAMES.get(kind, kind)
    if kind == "yarn" and "short_factor" in values:
        kind = "longrope"  # as early Phi-3 files call it
    if kind not in _USED:
        raise NotImplementedError(f"{where}: RoPE type: expected one of {', '.join(_USED)}, got {shown(kind)}.")
    unknown = sorted(key for key in values if key not in _COMMON | _ALLOWED[kind] and values[key] is not None)
    if unknown:
        raise ValueError(f"{where}: RoPE type {kind!r} has no key {shown(unknown[0])}; it reads {sorted(_USED[kind])}.")
    top = Fields(config, where)
    given = fields.integer("original_max_position_embeddings", 0)
    trained = top.integer("original_max_position_embeddings", 0) or given or max_positions
    if kind == "dynamic" and trained != max_positions:
        raise ValueError(
            f"{where}: dynamic RoPE is defined by max_position_embeddings ({max_positions}), "
            f"but original_max_position_embeddings is {trained}; make them equal."
        )
    part = fields.number("partial_rotary_factor", top.number("partial_rotary_factor", 1.0))
    if not 0 < part <= 1:
        raise ValueError(f"{where}: partial_rotary_factor: expected a number in (0, 1], got {part}.")
    plain = _USED[kind] - {"truncate", "short_factor", "long_factor"}
    arguments: dict[str, Any] = {name: fields.number(name) for name in plain if values.get(name) is not None}
    if part != 1 and head_dim is None:
        raise NotImplementedError(f"{where}: partial_rotary_factor: expected 1, got {part}.")
    if part != 1:
        assert head_dim is not None
        arguments["rotary_dim"] = int(head_dim * part)
    if kind == "yarn" and "factor" not in arguments and trained == max_positions:
        raise ValueError(f"{where}: RoPE type {kind!r} needs the key 'factor', or the trained length.")
    if kind == "yarn":
        arguments.setdefault("factor", max_positions / trained)
        arguments["truncate"] = fields.flag("truncate", True)
    if kind == "longrope":
        for name in ("short_factor", "long_factor"):
            if not values.get(name):
                raise ValueError(
                    f"{where}: RoPE type {kind!r} needs the key {name!r}, a factor for each pair of channels."
                )
        arguments.setdefault("factor", max_positions / trained)
        arguments |= {f"{name}_factors": fields.numbers(f"{name}_factor") for name in ("short", "long")}
    for name in {"linear": ["factor"], "dynamic": ["factor"], "llama3": sorted(_USED["llama3"])}.get(kind, []):
        if name not in arguments:
            raise ValueError(f"{where}: RoPE type {kind!r} needs the key {name!r}.")
    if kind in ("dynamic", "yarn", "llama3", "longrope"):
        arguments["original_max_positions"] = trained
    theta = fields.number("rope_theta", top.number("rope_theta", _DEFAULT_THETA))
    try:
        return RopeConfig(theta=theta, kind=cast(RopeKind, kind), **arguments)
    except ValueError as error:
        raise ValueError(f"{where}: {error}") from error


def _chosen(config: Mapping[str, Any], where: str) -> dict[str, Any]:
    """The one dict that describes the rotation."""
    old, new = config.get("rope_scaling"), config.get("rope_parameters")
    for name, value in (("rope_scaling", old), ("rope_parameters", new)):
        if value is not None and not isinstance(value, dict):
            raise ValueError(f"{where}: {name}: expected an object or null, got {shown(value)}.")
    if old and new and old != new:
        raise ValueError(f"{where}: rope_scaling and rope_parameters contradict each other; keep one of them.")
    return old or new or {}
