"""Everything of SGLang that this package relies on, in one table, and the checks that hold SGLang to it.

SGLang's Triton backend is not an interface that anybody promised to keep: between 0.5.9 and 0.5.23 the inner call
gained ten parameters and moved to another module. So nothing is taken on trust. `TABLE` lists each class, method,
parameter, attribute and dtype we touch, with the reason; a name that is missing, and just as much a parameter that
the table does not know, is a violation with a name, and a release with a violation runs stock.

When what is checked:

* `check(module)`, at the import of the backend module, before anything is wrapped: the classes, the methods and their
  parameters from the live module, the inner call's parameters from its source text. Its module must not be imported
  this early: 0.5.23's asks for the GPU's compute capability on import, which would create a CUDA context on GPU 0 in
  every process that merely imports the backend. The text says the same and costs three milliseconds.
* `check_instance(backend)`, when a backend has been constructed, before that instance is touched: its attributes, and
  the signature of the very function it is going to call, which somebody may have replaced.
"""

from __future__ import annotations

import ast
import importlib.util
import inspect
import re
import sys
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from types import ModuleType
from typing import Any, Final

BACKEND: Final = "TritonAttnBackend"
INIT: Final = "TritonAttnBackend.__init__"
FORWARD: Final = "TritonAttnBackend.forward_extend"
CAPTURE: Final = "TritonAttnBackend.init_forward_metadata_capture_cuda_graph"
REPLAY: Final = "TritonAttnBackend.init_forward_metadata_replay_cuda_graph"
GRAPH: Final = "TritonAttnBackend.init_forward_metadata_out_graph"
INSTANCE: Final = "TritonAttnBackend instance"
INNER: Final = "extend_attention_fwd"
MODE: Final = "ForwardMode"
BATCH: Final = "ForwardBatch"
LAYER: Final = "RadixAttention"
DATA: Final = "data"

# The methods before a capture or a replay, and the ways in which a release has them.
GRAPH_METHODS: Final = (CAPTURE, REPLAY, GRAPH)
GRAPH_WAYS: Final = (
    ("init_forward_metadata_capture_cuda_graph", "init_forward_metadata_replay_cuda_graph"),
    ("init_forward_metadata_out_graph",),
)

# Where the classes live. The backend module has imported both by the time it is checked, so they are only looked up.
HOMES: Final = {
    MODE: "sglang.srt.model_executor.forward_batch_info",
    BATCH: "sglang.srt.model_executor.forward_batch_info",
    LAYER: "sglang.srt.layers.radix_attention",
}
# Where the inner call lives: up to 0.5.15, and from then on.
INNER_HOMES: Final = (
    "sglang.srt.layers.attention.triton_ops.extend_attention",
    "sglang.kernels.ops.attention.extend_attention",
)


# What the line says besides the violations themselves.
UNKNOWN_RELEASE: Final = "this SGLang is none that the patch knows"


class _Any:
    """Stands for `no particular value`; None is a value like any other."""

    def __repr__(self) -> str:
        return "any"


ANY: Final = _Any()


@dataclass(frozen=True)
class Row:
    """One thing we rely on.

    `required` names must exist; the others are known, and may be absent in some release. A row with a `neutral` value
    is a parameter that changes what the call means: unless it is neutral the call is declined for `reason`. `dtypes`
    are the element types that are served.
    """

    where: str
    name: str
    why: str
    required: bool = True
    neutral: Any = ANY
    reason: str = ""
    dtypes: tuple[str, ...] = ()


FLOATS: Final = ("bfloat16", "float16")
FP8: Final = ("float8_e4m3fn", "float8_e5m2")
INDICES: Final = ("int32", "int64")
MASKS: Final = ("bool", "uint8")

TABLE: Final[tuple[Row, ...]] = (
    # The two methods that are wrapped. What else `__init__` takes does not matter: it is passed on.
    Row(BACKEND, "__init__", "wrapped: afterwards the instance gets its router"),
    Row(BACKEND, "forward_extend", "wrapped: only here the forward mode and the layer of an inner call are known"),
    Row(INIT, "model_runner", "kv_cache_dtype, tp_rank, for log lines, server_args.enable_metrics, where it has them"),
    Row(BACKEND, "init_forward_metadata", "wrapped: an eager step begins; what validation has found is fetched"),
    # Before a CUDA graph is captured or replayed SGLang prepares the metadata of its batch: through the first two, or
    # (from 0.5.13) through the third. They are wrapped because nothing else tells the host that a replay is coming.
    Row(BACKEND, "init_forward_metadata_capture_cuda_graph", "wrapped: a batch size is about to be captured", False),
    Row(BACKEND, "init_forward_metadata_replay_cuda_graph", "wrapped: a captured batch is about to be replayed", False),
    Row(BACKEND, "init_forward_metadata_out_graph", "wrapped: both of these (from 0.5.13)", False),
    Row(CAPTURE, "bs", "the batch size that is captured, padding included"),
    Row(CAPTURE, "forward_mode", "only verify graphs are of interest"),
    Row(REPLAY, "bs", "the captured batch size that is replayed"),
    Row(REPLAY, "forward_mode", "only verify graphs are of interest"),
    Row(GRAPH, "forward_batch", "its forward_mode and batch_size say the same"),
    Row(GRAPH, "in_capture", "true: captured, false: replayed"),
    # forward_extend is closed to unknown parameters: a new one may ask for something that our kernel does not compute.
    Row(FORWARD, "q", "known"),
    Row(FORWARD, "k", "known"),
    Row(FORWARD, "v", "known"),
    Row(FORWARD, "layer", "handed to the router for the duration of the call"),
    Row(FORWARD, "forward_batch", "handed to the router for the duration of the call"),
    Row(FORWARD, "save_kv_cache", "the KV store has happened, or not, before the inner call: no concern of ours"),
    Row(FORWARD, "sinks", "arrives in the inner call under the same name", required=False),
    Row(FORWARD, "score_mod", "arrives in the inner call under the same name", required=False),
    Row(FORWARD, "aux_tensors", "arrives in the inner call under the same name", required=False),
    # What the two arguments must be able to answer.
    Row(
        MODE,
        "is_target_verify",
        "asked of every forward_extend call: everything else is passed through at once, if nothing else is routed",
    ),
    Row(MODE, "DRAFT_EXTEND_V2", "by its name: routed if KDTREE_FORWARD_MODES has draft_extend", required=False),
    Row(MODE, "DRAFT_EXTEND", "the same, up to 0.5.13", required=False),
    Row(MODE, "EXTEND", "by its name: routed if KDTREE_FORWARD_MODES has extend", required=False),
    Row(BATCH, "forward_mode", "the mode that is asked"),
    Row(BATCH, "batch_size", "requests of a batch whose graph is captured or replayed, padding included"),
    Row(BATCH, "seq_lens_cpu", "prefix lengths on the host, for kv_len_max in the shapes line", required=False),
    Row(BATCH, "seq_lens_sum", "the same when seq_lens_cpu is absent and the batch is one request", required=False),
    Row(LAYER, "layer_id", "names the layer in the log lines and tells where a verify step begins"),
    # The instance, once it is constructed.
    Row(INSTANCE, "extend_attention_fwd", "replaced by the router, which calls it for everything that is declined"),
    Row(INSTANCE, "num_draft_tokens", "None: no speculative decoding, so no verify calls, so nothing is loaded"),
    Row(INSTANCE, "req_to_token", "a tensor that lies on the backend's own device: the kernel is loaded there"),
    Row(INSTANCE, "use_mla", "false: nothing is loaded (0.5.9 does not say)", required=False),
    Row(INSTANCE, "enable_deterministic", "true: the inner call is another one, so nothing is loaded", required=False),
    Row(
        INSTANCE,
        "dcp_size",
        "not 1: a rank has a part of the prefix, so nothing is loaded (from 0.5.15)",
        required=False,
    ),
    Row(INSTANCE, "skip_prefill", "true: draft decoding only, so there is no extend call to route", required=False),
    # The inner call: what the kernel computes from.
    Row(INNER, "q_extend", "(tokens, heads, 576), latent then rope", dtypes=FLOATS),
    Row(INNER, "k_extend", "(tokens, 1, 576): the draft rows, not in kv_indices", dtypes=FLOATS),
    Row(INNER, "v_extend", "(tokens, 1, 512): not read, see `data`", dtypes=FLOATS),
    Row(INNER, "o_extend", "(tokens, heads, 512): written", dtypes=FLOATS),
    Row(INNER, "k_buffer", "(slots, 1, 576): this layer's KV pool", dtypes=FLOATS + FP8),
    Row(INNER, "v_buffer", "(slots, 1, 512): a view of the same rows, not read", dtypes=FLOATS + FP8),
    Row(INNER, "qo_indptr", "bs + 1 offsets of the requests' draft tokens", dtypes=INDICES),
    Row(INNER, "kv_indptr", "bs + 1 offsets into kv_indices: the prefixes, without the drafts", dtypes=INDICES),
    Row(INNER, "kv_indices", "the slots of the prefixes", dtypes=INDICES),
    Row(INNER, "custom_mask", "q_len rows of prefix + q_len columns a request, or None: a causal chain", dtypes=MASKS),
    Row(INNER, "mask_indptr", "where each request's mask begins", dtypes=INDICES),
    Row(
        INNER,
        "max_len_extend",
        "q_len, the new tokens of the longest request; a tensor in some warm-ups, then declined",
    ),
    Row(INNER, "sm_scale", "None or 0 mean 1 / sqrt(576), as in the stock function"),
    # The inner call: what must be switched off, because the kernel does not do it. Scales must be with a pool of the
    # queries' type; those of an fp8 pool are served.
    Row(INNER, "is_causal", "the draft part is causal or masked below the diagonal", True, True, "not_causal"),
    Row(INNER, "k_scale", "what the prefix's keys are multiplied by (from 0.5.10)", False, 1.0, "kv_scale"),
    Row(INNER, "v_scale", "what the prefix's values are multiplied by (from 0.5.10)", False, 1.0, "kv_scale"),
    Row(INNER, "logit_cap", "tanh capping of the scores", False, 0.0, "logit_cap"),
    Row(INNER, "skip_prefix_custom_mask", "the prefix is visible to every draft token", False, True, "prefix_mask"),
    Row(INNER, "sliding_window_size", "a window over the prefix", False, -1, "sliding_window"),
    Row(INNER, "window_kv_offsets", "the prefix begins later than the mask's columns", False, None, "sliding_window"),
    Row(INNER, "sinks", "attention sinks", False, None, "sinks"),
    Row(INNER, "xai_temperature_len", "temperature by position", False, -1, "xai_temperature"),
    Row(INNER, "lse_extend", "asks for the log-sum-exp as well (from 0.5.15)", False, None, "lse"),
    Row(INNER, "skip_prefix", "only the drafts (from 0.5.15)", False, False, "skip_part"),
    Row(INNER, "skip_extend", "only the prefix (from 0.5.15)", False, False, "skip_part"),
    Row(INNER, "score_mod", "a function of the scores (from 0.5.16)", False, None, "score_mod"),
    Row(INNER, "aux_tensors", "arguments of score_mod (from 0.5.16)", False, None, "score_mod"),
    Row(INNER, "identity_kv_indices", "kv_indices are not to be read (from 0.5.20)", False, False, "identity_indices"),
    # The inner call: known, and without meaning for us.
    Row(INNER, "page_size", "kv_indices are per token whatever the page size (from 0.5.15)", False),
    Row(INNER, "extend_seq_lens_cpu", "sizes the stock kernel's grid on AMD (from 0.5.18)", False),
    # What no signature can say. Validation checks the first on every call it validates; the others have tests.
    Row(DATA, "v_is_latent", "v_extend equals k_extend[..., :512]: absorbed MLA passes k_nope as both"),
    Row(DATA, "latent_first", "a row is [latent 512 | rope 64], and V is its first 512 columns"),
    Row(DATA, "parents_first", "the mask's draft part is lower-triangular: stock stops at the diagonal block"),
)


def sglang_version() -> str:
    """As SGLang says it. A source tree without installed metadata says 0.0.0.dev0; still better than nothing."""
    return str(getattr(sys.modules.get("sglang"), "__version__", "unknown"))


def rows(where: str) -> tuple[Row, ...]:
    return tuple(row for row in TABLE if row.where == where)


def switches() -> tuple[Row, ...]:
    """The parameters of the inner call that must be switched off for the kernel to serve it."""
    return tuple(row for row in rows(INNER) if row.neutral is not ANY)


def is_neutral(value: Any, neutral: Any) -> bool:
    """True when `value` switches its parameter off. A tensor never does, and is not read to find out."""
    if value is neutral:
        return True
    # 1 == True and 0 == False in Python, so a number only ever equals a number, and a flag a flag.
    return type(value) in (int, float) and type(neutral) in (int, float) and bool(value == neutral)


def check(module: ModuleType) -> list[str]:
    """The violations of the backend module, each naming what is wrong; an empty list means that it may be wrapped."""
    backend = getattr(module, BACKEND, None)
    if not isinstance(backend, type):
        return [f"{BACKEND}: missing class"]
    methods = {row.name: vars(backend).get(row.name) for row in rows(BACKEND)}
    needed = [row.name for row in rows(BACKEND) if row.required]
    found = [f"{BACKEND}.{name}: missing method" for name in needed if not callable(methods[name])]
    if not found:
        found += _missing(INIT, _live_parameters(methods["__init__"]))
        forward = _live_parameters(methods["forward_extend"])
        found += _missing(FORWARD, forward) + _unknown(FORWARD, list(forward)[1:])  # all but self
    if not any(set(way) <= vars(backend).keys() for way in GRAPH_WAYS):
        found.append(f"{BACKEND}: missing methods {' or '.join(' and '.join(way) for way in GRAPH_WAYS)}")
    for where in GRAPH_METHODS:
        method = methods[where.split(".")[1]]
        if callable(method):
            found += _missing(where, _live_parameters(method))
    return found + _class_violations() + _inner_source_violations()


THERE, ABSENT, VIOLATED, LATER = "there", "absent", "violated", "checked at work"


def outcomes(module: ModuleType) -> list[tuple[Row, str]]:
    """Each row with what has become of it: there; absent, as in some releases; violated, as `check` says; or a matter
    of the constructed backend or of validation.
    """
    violations = check(module)
    backend = getattr(module, BACKEND, None)
    methods = dict(vars(backend)) if isinstance(backend, type) else {}
    names: dict[str, set[str]] = {BACKEND: set(methods)}
    for where in (INIT, FORWARD, *GRAPH_METHODS):
        names[where] = set(_live_parameters(methods.get(where.split(".")[1])))
    for where, home in HOMES.items():
        cls = getattr(sys.modules.get(home), where, None)
        names[where] = _names_of(cls) if isinstance(cls, type) else set()
    text = next((text for home in INNER_HOMES if (text := _source(home)) is not None), "")
    names[INNER] = set(source_parameters(text, INNER) or ())

    def outcome(row: Row) -> str:
        if row.where not in names:
            return LATER
        named = (f"{row.where}({row.name})", f"{row.where}({row.name}=", f"{row.where}.{row.name}:")
        if any(violation.startswith(named) for violation in violations):
            return VIOLATED
        if row.name in names[row.where]:
            return THERE
        # A release without one of the methods for graphs has another one; without a class it has none of its rows.
        return VIOLATED if row.required and row.where not in GRAPH_METHODS else ABSENT

    return [(row, outcome(row)) for row in TABLE]


def check_instance(backend: object) -> list[str]:
    """The violations of a constructed backend, each naming what is wrong."""
    found = [
        f"{INSTANCE}: missing attribute {row.name}"
        for row in rows(INSTANCE)
        if row.required and not hasattr(backend, row.name)
    ]
    return found or check_inner(_live_parameters(getattr(backend, INNER)))


def check_inner(parameters: Mapping[str, Any]) -> list[str]:
    """The violations of the inner call's parameters, given as name to default (`inspect.Parameter.empty` for none)."""
    found = _missing(INNER, parameters) + _unknown(INNER, parameters)
    for row in switches():
        # A parameter that the caller leaves out takes its default, so the default has to be neutral too.
        default = parameters.get(row.name, inspect.Parameter.empty)
        if default is not inspect.Parameter.empty and not is_neutral(default, row.neutral):
            found.append(f"{INNER}({row.name}={default!r}): the default was {row.neutral!r}")
    return found


def _missing(where: str, names: Iterable[str]) -> list[str]:
    present = set(names)
    return [f"{where}({row.name}): missing" for row in rows(where) if row.required and row.name not in present]


def _unknown(where: str, names: Iterable[str]) -> list[str]:
    known = {row.name for row in rows(where)}
    return [f"{where}({name}): unknown" for name in names if name not in known]


def _live_parameters(function: Callable[..., Any] | None) -> dict[str, Any]:
    """Name to default. Through other people's wrappers, as long as they say what they wrap.

    One that does not shows as `*args` and `**kwargs`, which the table does not know: that is a violation, and rightly
    so, because nothing can be bound by name through it.
    """
    if function is None:
        return {}
    # Printed, a parameter begins with its stars and its name.
    found = inspect.signature(function).parameters.values()
    return {re.split("[:=]", str(parameter), maxsplit=1)[0].strip(): parameter.default for parameter in found}


def _class_violations() -> list[str]:
    """Names that the arguments of forward_extend must have, looked up where SGLang has already imported them."""
    found = []
    for where, home in HOMES.items():
        cls = getattr(sys.modules.get(home), where, None)
        if not isinstance(cls, type):
            found.append(f"{where}: missing class in {home}")
            continue
        names = _names_of(cls)
        found += [f"{where}.{row.name}: missing" for row in rows(where) if row.required and row.name not in names]
    return found


def _names_of(cls: type) -> set[str]:
    """What an instance has, as far as the class tells: attributes, annotated fields, the constructor's parameters."""
    names: set[str] = set(getattr(cls, "__members__", ()))  # of an Enum, which Python 3.10 keeps nowhere else
    for base in cls.__mro__:  # dir() would leave out the methods of an Enum
        names |= set(vars(base)) | set(vars(base).get("__annotations__", ()))
    return names | set(_live_parameters(vars(cls).get("__init__")))


def _inner_source_violations() -> list[str]:
    for home in INNER_HOMES:
        text = _source(home)
        if text is not None:
            parameters = source_parameters(text, INNER)
            return [f"{INNER}: missing function in {home}"] if parameters is None else check_inner(parameters)
    return [f"{INNER}: no source in {' or '.join(INNER_HOMES)}"]


def _source(module: str) -> str | None:
    """The text of a module, without importing it. Its packages are, as the backend itself does."""
    try:
        spec = importlib.util.find_spec(module)
        loader = getattr(spec, "loader", None)
        return loader.get_source(module) if loader is not None else None
    except (ImportError, AttributeError):
        return None


def source_parameters(text: str, function: str) -> dict[str, Any] | None:
    """The parameters of a top-level function as its source has them, name to default; None when there is no such
    function.

    A default that is not a literal stays as its source text: it is compared with neutral values only, and equals none.
    """
    for node in ast.parse(text).body:
        if isinstance(node, ast.FunctionDef) and node.name == function:
            break
    else:
        return None
    plain = node.args.posonlyargs + node.args.args
    empty = inspect.Parameter.empty
    found: dict[str, Any] = {argument.arg: empty for argument in plain}
    with_default = plain[len(plain) - len(node.args.defaults) :]
    found |= {
        argument.arg: _literal(default) for argument, default in zip(with_default, node.args.defaults, strict=True)
    }
    if node.args.vararg is not None:
        found[f"*{node.args.vararg.arg}"] = empty
    for argument, default in zip(node.args.kwonlyargs, node.args.kw_defaults, strict=True):
        found[argument.arg] = empty if default is None else _literal(default)
    if node.args.kwarg is not None:
        found[f"**{node.args.kwarg.arg}"] = empty
    return found


def _literal(node: ast.expr) -> Any:
    try:
        return ast.literal_eval(node)
    except ValueError:
        return ast.unparse(node)
