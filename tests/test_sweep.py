"""A sweep over model classes: none silently wrong, and the page in docs says what is so."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch._dynamo.testing import CompileCounterWithBackend

transformers = pytest.importorskip("transformers", minversion="5")

import ringattn  # noqa: E402
from ringattn import hf  # noqa: E402
from ringattn.hf import families  # noqa: E402
from tests.sweep import (  # noqa: E402
    SEQLEN,
    WORLDS,
    batches,
    classes,
    error_of,
    judge,
    kinds_on_page,
    make,
    quiet,
    run_one,
    sweep_all,
    version_on_page,
)

IS_ON_PAGE = transformers.__version__ == version_on_page()

NAMED = (
    *("CohereForCausalLM", "Cohere2ForCausalLM", "DeepseekV3ForCausalLM", "Gemma2ForCausalLM", "Gemma3ForCausalLM"),
    *("GlmForCausalLM", "GptOssForCausalLM", "GraniteForCausalLM", "Llama4ForCausalLM", "MixtralForCausalLM"),
    *("Olmo2ForCausalLM", "Phi3ForCausalLM", "Qwen3MoeForCausalLM"),
    *("BertForMaskedLM", "ModernBertForMaskedLM", "RobertaForMaskedLM"),
)
REFUSED = {
    "BartForCausalLM": "mixes tokens outside of attention, or does not use position_ids",
    "CpmAntForCausalLM": "makes no attention call",
    "FalconForCausalLM": "its attention is of its own making",
    "MambaForCausalLM": "layer_types has 'linear_attention'",
    "StableLmForCausalLM": "the keyword argument ring is missing",
}


def test_named_families_are_right_and_others_refused() -> None:
    found = sweep_all(2, (*NAMED, *REFUSED))
    modernbert = found["ModernBertForMaskedLM"]
    if modernbert.kind == "refused" and "KeyError" in modernbert.detail:  # older versions have a table of their own
        del found["ModernBertForMaskedLM"]
    assert {name: found[name] for name in NAMED if name in found and found[name].kind != "right"} == {}
    for name, words in REFUSED.items():
        assert found[name].kind in (("refused",) if IS_ON_PAGE else ("refused", "not made"))
        assert words in found[name].detail or not IS_ON_PAGE


@pytest.mark.slow
@pytest.mark.parametrize("world_size", WORLDS)
def test_no_class_is_silently_wrong(world_size: int) -> None:
    found = sweep_all(world_size, tuple(classes()))
    assert {name: result for name, result in found.items() if result.kind == "wrong"} == {}
    if IS_ON_PAGE:
        assert {name: result.kind for name, result in found.items()} == kinds_on_page()


@pytest.mark.skipif(not IS_ON_PAGE, reason=f"needs transformers {version_on_page()}, which docs/models.md is about")
def test_the_page_has_every_class_and_at_least_eighty_are_right() -> None:
    kinds = kinds_on_page()
    assert kinds.keys() == classes().keys()
    assert sum(kind == "right" for kind in kinds.values()) >= 80
    assert {name for name in NAMED if kinds[name] != "right"} == set()


def test_attention_with_sinks_and_windows_is_one_graph() -> None:
    with quiet():
        model = hf.attach(make("GptOssForCausalLM", "ringattn"), None)
        batch = batches(True)["packed"]
        wanted = run_one(model, batch, torch.arange(SEQLEN))
        counter = CompileCounterWithBackend("aot_eager")
        torch._dynamo.reset()
        for layer in model.model.layers:
            layer.self_attn.compile(backend=counter, fullgraph=True)
        found = run_one(model, batch, torch.arange(SEQLEN))
    assert counter.frame_count == 2  # the first layer, in which ranks compare their arguments, and the other
    assert max(map(error_of, found, wanted)) <= 1e-12


def without(**changes: Any) -> Callable[..., Any]:
    real = ringattn.ring_attention
    return lambda *args, **kwargs: real(*args, **{**kwargs, **changes})


@pytest.mark.parametrize(
    ("name", "changes"),
    [
        ("GptOssForCausalLM", {"sinks": None}),
        ("Gemma2ForCausalLM", {"softcap": None}),
        ("Gemma2ForCausalLM", {"softmax_scale": None}),
        ("MistralForCausalLM", {"mask": ringattn.Causal()}),
        ("BertForMaskedLM", {"mask": ringattn.Causal()}),
    ],
)
def test_the_sweep_notices_what_is_dropped(name: str, changes: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    with quiet():
        assert judge(name, 0, 1).kind == "right"
        monkeypatch.setattr(ringattn, "ring_attention", without(**changes))
        assert judge(name, 0, 1).kind == "wrong"


def test_the_sweep_notices_a_family_that_is_not_known(monkeypatch: pytest.MonkeyPatch) -> None:
    with quiet():
        assert judge("Llama4ForCausalLM", 0, 1).kind == "right"
        monkeypatch.delitem(families.QUERY_SCALES, "Llama4TextAttention")
        assert judge("Llama4ForCausalLM", 0, 1).kind != "right"
