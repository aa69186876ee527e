"""What gave offence in the last declined call, in a form that costs little to look for in the next one. Knows the
decline reasons and the contract.

A service may have something for good that the kernel does not serve: a window, a pool of another dtype. It must not pay
for that in every layer of every step. So the router remembers, not the call, but the facts about a few of its arguments
from which the reason follows whatever the others are. A call with the same facts is declined for the same reason; any
other is decided anew. That a tensor is the same object is no such fact: it can be resized, or given another storage, in
place.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from operator import attrgetter, itemgetter
from typing import Any, Final

from kdtree_patch import contract

# The arguments from which each reason follows, for its line and for the memory. Those of "not_mla" and "layout"
# `route.ill_shaped` and `ill_laid` say, those of a switch are in the contract.
ABOUT: Final[dict[str, tuple[str, ...]]] = {
    "empty_batch": ("q_extend", "qo_indptr"),
    "heads": ("q_extend",),
    "max_len_unknown": ("max_len_extend",),
    "q_len": ("q_extend", "qo_indptr", "max_len_extend"),
    "dtype": ("q_extend", "k_extend", "v_extend", "o_extend"),
    "kv_dtype": ("q_extend", "k_buffer", "v_buffer"),
    "mask_dtype": ("custom_mask",),
    "index_dtype": ("qo_indptr", "kv_indptr", "kv_indices", "custom_mask", "mask_indptr"),
    "scale": ("sm_scale",),
    "kv_scale": ("k_buffer", "k_scale", "v_scale"),
    "too_many_tiles": ("q_extend", "qo_indptr", "kv_indices", "max_len_extend"),
    "device": (
        *("q_extend", "k_extend", "o_extend", "k_buffer"),
        *("qo_indptr", "kv_indptr", "kv_indices", "custom_mask", "mask_indptr"),
    ),
}

# From the values of those arguments to what the reason follows from. It is compared, so no tensor may be among it.
Facts = Callable[[Sequence[Any]], object]


def _tensors(attribute: str) -> Facts:
    of = attrgetter(attribute)
    return lambda values: [*map(of, values)]


def _with_or_without(attribute: str) -> Facts:
    return lambda values: [getattr(value, attribute, None) for value in values]


def _types(values: Sequence[Any]) -> object:
    return [*map(type, values)]


def _shapes_and_length(values: Sequence[Any]) -> object:
    *tensors, length = values
    return [*map(_SHAPE, tensors), length if type(length) is int else None]


def _layouts(values: Sequence[Any]) -> object:
    each = [(value.shape, value.stride(), value.data_ptr() % 16) for value in values]
    return each, values[0].data_ptr() == values[-1].data_ptr()


def _pool_and_scales(values: Sequence[Any]) -> object:
    pool, *scales = values
    return pool.dtype, [scale if type(scale) in (int, float) else type(scale) for scale in scales]


_SHAPE: Final = attrgetter("shape")
# What is nowhere here is not remembered: arguments of a kind that nobody foresaw are decided call by call.
_FACTS: Final[dict[str, Facts]] = {
    **dict.fromkeys(("empty_batch", "not_mla", "heads"), _tensors("shape")),
    **dict.fromkeys(("dtype", "kv_dtype", "mask_dtype"), _tensors("dtype")),
    **dict.fromkeys(("q_len", "too_many_tiles"), _shapes_and_length),
    **dict.fromkeys(("max_len_unknown", "scale"), _types),
    "index_dtype": _with_or_without("dtype"),
    "kv_scale": _pool_and_scales,
    "device": _with_or_without("device"),
    "layout": _layouts,
}
_SWITCHES: Final = {row.name: row for row in contract.switches()}


class LastDeclined:
    """The reason of the last declined call and what gave offence. `names` are the inner function's parameters."""

    def __init__(self, names: Sequence[str]):
        self._at = {name: at for at, name in enumerate(names)}
        self._reason: str | None = None
        self._look: Callable[[Sequence[Any], Mapping[str, Any]], object]
        self._seen: object = None

    def again(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> str | None:
        """The reason, if this call gives the same offence; None if there was none, or the call has to be decided."""
        if self._reason is None:
            return None
        try:
            return self._reason if self._look(args, kwargs) == self._seen else None
        except Exception:
            return None  # put together in another way, or of a kind that nobody foresaw

    def remember(self, reason: str, names: Sequence[str], args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
        """`names`: the arguments from which the reason follows."""
        self._reason = None
        try:
            facts = _FACTS.get(reason) or self._switched_on(names[0])
            self._look = self._looking(names, facts, len(args))
            self._seen = self._look(args, kwargs)
        except Exception:
            return
        self._reason = reason

    def _looking(
        self, names: Sequence[str], facts: Facts, positional: int
    ) -> Callable[[Sequence[Any], Mapping[str, Any]], object]:
        """With the arguments found as they were passed, by place or by name: that is what is quick."""
        places = [self._at[name] for name in names]
        if max(places) < positional:
            # Of a single place itemgetter would return the bare value.
            pick = itemgetter(*places) if len(places) > 1 else itemgetter(slice(places[0], places[0] + 1))
            return lambda args, _: facts(pick(args))
        if min(places) >= positional:
            return lambda _, kwargs: facts([kwargs[name] for name in names])
        return lambda args, kwargs: facts(
            [args[at] if at < len(args) else kwargs[name] for at, name in zip(places, names, strict=True)]
        )

    @staticmethod
    def _switched_on(name: str) -> Facts:
        neutral = _SWITCHES[name].neutral
        return lambda values: contract.is_neutral(values[0], neutral)
