"""Validation: the figures, the layer line to the letter, which calls are validated, and which result is served."""

from __future__ import annotations

import math
import re
from typing import Any

import pytest
import torch

from kdtree_patch import validate
from kdtree_patch.ledger import Ledger
from kdtree_patch.route import VerifyRouter
from kdtree_patch.settings import Settings
from kdtree_patch.validate import CHUNK, Difference, Steps, scratch_elements
from tests.fakes import FakeKernel, Stock, a_batch, a_case, a_layer, arguments
from tests.support.cases import reference, with_drafts
from tests.support.reference import rel

pytestmark = pytest.mark.usefixtures("all_lines")

NUMBER = r"(?:\d\.\d{4}e[+-]\d\d|inf|nan)"
LAYER_LINE = re.compile(rf"\[kdtree\] L(\d+) max_abs_diff=({NUMBER}) mean=({NUMBER}) rel=({NUMBER})((?: \w+=\S+)*)")


# The figures.


def difference(ours: torch.Tensor, stock: torch.Tensor) -> Difference:
    return validate.difference(ours, stock, torch.empty(scratch_elements(ours), dtype=torch.float64))


@pytest.mark.parametrize(
    "shape", [(1,), (1000,), (CHUNK + 7,), (5, CHUNK // 2 - 1), (2, CHUNK + 1), (9, 8, 512)], ids=str
)
def test_the_figures(shape: tuple[int, ...]) -> None:
    """Of outputs that are compared in one piece, and in several."""
    generator = torch.Generator().manual_seed(shape[0])
    stock = torch.randn(shape, generator=generator)
    ours = stock + 0.01 * torch.randn(shape, generator=generator)
    ours.view(-1)[-1] += 1  # the largest difference is in the last piece
    found = difference(ours, stock)
    gap = (ours.double() - stock.double()).abs()
    assert found.max_abs_diff == float(gap.max())
    assert math.isclose(found.mean, float(gap.mean()), rel_tol=1e-9)
    assert math.isclose(found.rel, float(gap.norm() / stock.double().norm()), rel_tol=1e-9)
    assert (found.nan, found.stock_nan) == (0, 0)


def test_half_precision_does_not_overflow() -> None:
    stock = torch.full((4, 512), 6e4, dtype=torch.float16)
    found = difference(-stock, stock)
    assert (found.max_abs_diff, found.rel) == (2 * float(stock[0, 0]), 2.0)


def test_what_is_not_finite_is_counted_and_left_out() -> None:
    stock = torch.tensor([1.0, 2.0, math.nan, 4.0, 5.0])
    ours = torch.tensor([1.0, 2.5, 0.0, math.nan, math.inf])
    found = difference(ours, stock)
    assert (found.nan, found.stock_nan) == (2, 1)
    assert (found.max_abs_diff, found.mean) == (0.5, 0.25)
    # Of the stock result whatever is finite counts: a NaN of ours must not make it small.
    assert math.isclose(found.rel, 0.5 / math.sqrt(1 + 4 + 16 + 25))


def test_zeros_and_nothing() -> None:
    zeros = torch.zeros(8)
    assert difference(zeros, zeros) == Difference(0.0, 0.0, 0.0, 0, 0)
    assert difference(zeros + 1, zeros).rel == math.inf
    assert difference(zeros * math.nan, zeros) == Difference(0.0, 0.0, 0.0, 8, 0)


def test_the_line_to_the_letter() -> None:
    found = Difference(1.6934, 0.11948, 1.0837, 0, 0)
    assert found.line(56, None) == "L56 max_abs_diff=1.6934e+00 mean=1.1948e-01 rel=1.0837e+00"
    more = Difference(1.6934, 0.11948, 1.0837, 3, 512)
    assert more.line(56, 7) == f"{found.line(56, None)} nan=3 stock_nan=512 tp_rank=7"


def test_rank_zero_is_a_rank() -> None:
    assert Difference(0, 0, 0, 0, 0).line(0, 0).endswith(" tp_rank=0")


# Which calls.


def validated(every: int, layers: list[int]) -> list[bool]:
    steps = Steps(every)
    return [steps.due(layer) for layer in layers]


def test_all_layers_of_every_nth_step() -> None:
    assert validated(1, [0, 1, 2] * 3) == [True] * 9
    assert validated(3, [0, 1, 2] * 5) == [i // 3 in (0, 3) for i in range(15)]


def test_a_step_begins_with_the_lowest_layer() -> None:
    """Of a pipeline stage, of a hybrid model, and when the first one seen is not the lowest."""
    assert validated(2, [30, 31, 45] * 2) == [True] * 3 + [False] * 3
    assert validated(2, [7, 8, 0, 7, 8, 0, 7, 8]) == [True] * 2 + [False] * 3 + [True] * 3


def test_a_model_of_one_layer() -> None:
    assert validated(2, [4] * 4) == [True, False, True, False]


# Which result.


def run(
    settings: Settings,
    kernel: FakeKernel,
    changes: dict[str, Any] | None = None,
    layers: tuple[int, ...] = (3,),
    stock: Stock | None = None,
    **case: Any,
) -> tuple[torch.Tensor, VerifyRouter, Stock, torch.Tensor]:
    """Routes one call a layer: the output, the router, the stock function and what is right."""
    made, stock = a_case(**case), stock or Stock(answer="stock's answer")
    router = VerifyRouter(stock.function, kernel, settings, Ledger(), rank=2)
    for layer in layers:
        made.out.fill_(torch.nan)
        router.context = (a_layer(layer), a_batch())
        result = router(**arguments(made, **(changes or {})))
        assert result == (stock.answer if settings.mode == "shadow" or router.ledger.disabled else None)
    return made.out, router, stock, reference(made)


ON = Settings(validate=True)
SHADOW = Settings(mode="shadow", validate=True)


def layer_lines(capsys: pytest.CaptureFixture[str]) -> list[re.Match[str]]:
    matches = [LAYER_LINE.fullmatch(line) for line in capsys.readouterr().err.splitlines()]
    return [match for match in matches if match]


@pytest.mark.parametrize(("settings", "served"), [(ON, 1.0), (SHADOW, 0.0)], ids=["on", "shadow"])
def test_both_are_computed_and_one_is_served(
    settings: Settings, served: float, capsys: pytest.CaptureFixture[str]
) -> None:
    """Our kernel adds 1 to every element: the line says so, and the output has it in mode `on` alone."""
    kernel = FakeKernel(mark=1.0)
    out, router, stock, right = run(settings, kernel)
    assert (len(kernel.calls), len(stock.calls)) == (1, 1)
    assert torch.allclose(out.double(), right + served, atol=1e-2)
    # The real output is written by one kernel alone.
    writers = [call["out"] is out for call in kernel.calls] + [call["o_extend"] is out for call in stock.calls]
    assert writers == [served == 1.0, served == 0.0]
    assert router.ledger.counts == {("kernel", "verify") if served else ("stock", "shadow"): 1}
    (line,) = layer_lines(capsys)
    layer, largest, mean, rel, more = line.groups()
    assert (layer, more) == ("3", " tp_rank=2")
    assert float(largest) == pytest.approx(1, abs=1e-2) and float(mean) == pytest.approx(1, abs=1e-2)
    assert float(rel) == pytest.approx(float(right.numel() ** 0.5 / right.norm()), rel=1e-2)


@pytest.mark.parametrize("settings", [ON, SHADOW], ids=["on", "shadow"])
def test_every_layer_has_its_line(settings: Settings, capsys: pytest.CaptureFixture[str]) -> None:
    run(settings, FakeKernel(), layers=tuple(range(61)), prefixes=[1], q_len=1, heads=1)
    assert [match[1] for match in layer_lines(capsys)] == [str(layer) for layer in range(61)]


@pytest.mark.parametrize("mode", ["on", "shadow"])
def test_between_validated_steps_only_what_is_served_is_computed(mode: str, capsys: pytest.CaptureFixture[str]) -> None:
    kernel = FakeKernel()
    settings = Settings(mode=mode, validate=True, validate_every=2)
    _, router, stock, _ = run(settings, kernel, layers=(0, 1) * 4)
    assert [match[1] for match in layer_lines(capsys)] == ["0", "1"] * 2
    ours, theirs = (8, 4) if mode == "on" else (4, 8)
    assert (len(kernel.calls), len(stock.calls)) == (ours, theirs)


def test_without_validation_nothing_is_computed_twice(capsys: pytest.CaptureFixture[str]) -> None:
    kernel = FakeKernel()
    _, _, stock, _ = run(Settings(), kernel)
    assert (len(kernel.calls), len(stock.calls)) == (1, 0)
    assert layer_lines(capsys) == []


# What validation finds, and what it must not cause.


def test_a_row_that_sees_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    """Stock computes 0 / 0 there; ours is 0. That is no difference, and is said."""
    stock = Stock()
    plain = stock.function

    def stock_with_nan(*args: Any, **kwargs: Any) -> None:
        plain(*args, **kwargs)
        kwargs["o_extend"][1] = torch.nan

    made = a_case(mask="zero_row")
    router = VerifyRouter(plain, FakeKernel(), ON, Ledger())
    router.stock = stock_with_nan
    router.context = (a_layer(), a_batch())
    router(**arguments(made))
    (line,) = layer_lines(capsys)
    assert line[5] == " stock_nan=1024"
    assert float(line[4]) == 0.0


@pytest.mark.parametrize("settings", [ON, SHADOW], ids=["on", "shadow"])
def test_v_that_is_not_the_latent_part(settings: Settings, capsys: pytest.CaptureFixture[str]) -> None:
    """The kernel would be wrong for such a model: said loudly, and stock from this call on."""
    v = torch.randn(6, 1, 512, dtype=torch.float16)
    kernel = FakeKernel(mark=1.0)
    _, router, stock, _ = run(settings, kernel, {"v_extend": v}, layers=(3, 4))
    assert (len(kernel.calls), len(stock.calls)) == (0, 2)
    assert router.ledger.disabled == "v_not_latent"
    errors = [line for line in capsys.readouterr().err.splitlines() if line.startswith("[kdtree] ERROR")]
    assert len(errors) == 1 and "layer 3: v_extend is not the latent part of k_extend" in errors[0]


def test_nan_in_k_is_not_mistaken_for_it() -> None:
    made = a_case()
    made.k_extend[0] = torch.nan
    router = VerifyRouter(Stock().function, FakeKernel(), ON, Ledger())
    router.context = (a_layer(), a_batch())
    router(**arguments(made))
    assert router.ledger.disabled is None


def test_shadow_survives_a_kernel_that_fails(capsys: pytest.CaptureFixture[str]) -> None:
    kernel = FakeKernel(error=RuntimeError("no"))
    out, router, stock, right = run(SHADOW, kernel, layers=(0, 1))
    assert torch.allclose(out.double(), right, atol=1e-2)
    assert (len(kernel.calls), len(stock.calls)) == (1, 2)
    assert layer_lines(capsys) == [] and router.ledger.disabled == "launch_failed"


def test_on_survives_a_kernel_that_fails() -> None:
    kernel = FakeKernel(error=RuntimeError("no"))
    out, _, stock, right = run(ON, kernel, layers=(0, 1))
    assert torch.allclose(out.double(), right, atol=1e-2)
    assert (len(kernel.calls), len(stock.calls)) == (1, 2)


def test_no_memory_to_validate_with(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """The call is served all the same, and the lack is said once."""

    def none_left(*args: Any, **kwargs: Any) -> Any:
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(validate.Buffers, "get", none_left)
    kernel = FakeKernel()
    _, router, stock, _ = run(ON, kernel, layers=(0, 1))
    assert (len(kernel.calls), len(stock.calls)) == (2, 0)
    assert router.ledger.counts == {("kernel", "verify"): 2}
    warnings = [line for line in capsys.readouterr().err.splitlines() if "WARNING" in line]
    (warning,) = warnings
    assert warning.startswith(
        "[kdtree] WARNING validation failed: OutOfMemoryError: CUDA out of memory; the call's own "
    )


def test_a_stock_kernel_that_fails_in_validation_is_not_the_services_problem() -> None:
    router = VerifyRouter(Stock().function, FakeKernel(mark=1.0), ON, Ledger())
    router.stock = lambda *args, **kwargs: 1 / 0
    router.context = (a_layer(), a_batch())
    made = a_case()
    assert router(**arguments(made)) is None
    assert torch.allclose(made.out.double(), reference(made) + 1, atol=1e-2)


def test_an_error_that_took_the_context_is_not_swallowed_by_validation(monkeypatch: pytest.MonkeyPatch) -> None:
    """An asynchronous fault of our kernel shows when the outputs are compared."""
    error = RuntimeError("CUDA error: an illegal memory access was encountered")
    error.error_code = 700  # type: ignore[attr-defined]

    def fault(*args: Any) -> Any:
        raise error

    monkeypatch.setattr("kdtree_patch.compare.difference", fault)
    with pytest.raises(RuntimeError, match="illegal memory access"):
        run(ON, FakeKernel())


@pytest.mark.parametrize("mode", ["on", "shadow"])
def test_padding_of_an_extend_is_in_no_figure(mode: str, capsys: pytest.CaptureFixture[str]) -> None:
    """Tokens behind those of the last request: neither kernel writes them, so what lies there says nothing."""
    case = with_drafts(a_case(prefixes=[4, 4], q_len=4, mask="none"), [3, 1])
    case.q, case.k_extend = (torch.cat([tensor, tensor[:3]]) for tensor in (case.q, case.k_extend))
    case.out = torch.full((7, *case.out.shape[1:]), torch.nan, dtype=case.out.dtype)
    kernel = FakeKernel()
    launch = kernel.launch

    def with_old_memory(*args: Any) -> None:
        launch(*args)
        args[2][4:] = 1e3

    kernel.launch = with_old_memory  # type: ignore[method-assign]
    settings = Settings(mode=mode, validate=True, guard_rel=0.01, forward_modes=frozenset({"extend"}))
    router = VerifyRouter(Stock().function, kernel, settings, Ledger())
    router.context, router.mode = (a_layer(), a_batch()), "extend"
    router(**arguments(case))
    (line,) = layer_lines(capsys)
    assert float(line[4]) == 0.0 and line[5] == " mode=extend"
    assert router.ledger.disabled is None
    assert rel(case.out[:4], reference(case)[:4]) < 1e-3


def test_the_mean_is_that_of_the_tokens_that_were_looked_at() -> None:
    ours, stock = torch.tensor([[2.0, 2.0], [9.0, 9.0]]), torch.tensor([[1.0, 1.0], [0.0, 0.0]])
    scratch = torch.empty(scratch_elements(ours), dtype=torch.float64)
    found = validate.difference(ours, stock, scratch, torch.tensor([False, True]))
    assert (found.mean, found.max_abs_diff, found.rel) == (1.0, 1.0, 1.0)
