"""Training on a mesh is training in one process."""

import math

import pytest
import torch

from ndwrap import parallelize
from tests.models import build, mesh_of, on_mesh, one_process, relative_error
from tests.processes import run

# dp_replicate, dp_shard, cp, tp; by world size, because changing it costs new processes
MESHES = {
    "fsdp": (1, 2, 1, 1),
    "cp": (1, 1, 2, 1),
    "tp": (1, 1, 1, 2),
    "hsdp": (2, 2, 1, 1),
    "fsdp_cp": (1, 2, 2, 1),
    "cp_tp": (1, 1, 2, 2),
    "fsdp_cp_tp": (1, 2, 2, 2),
    "hsdp_cp_tp": (2, 1, 2, 2),
}
MODELS = {"llama": ("llama", False), "qwen3_tied": ("qwen3", True)}


def run_on_mesh(name, model, dtype, steps, **options):
    sizes = MESHES[name]
    return run(math.prod(sizes), on_mesh, sizes, *model[:1], dtype, model[1], steps, options)


def check_run(runs, want, *, grads, rest, weights=None):
    for r in runs:
        assert r.losses == pytest.approx(want.losses[: len(r.losses)], rel=rest)
        assert r.norms == pytest.approx(want.norms[: len(r.norms)], rel=rest)
        assert r.norms == runs[0].norms
    assert max(relative_error(*pair) for pair in zip(runs[0].grads, want.grads, strict=False)) <= grads
    if weights is not None:
        assert relative_error(runs[0].weights, want.weights) <= weights


# fp64 tolerances: rounding of sums in another order, some 1e3 terms of 1e-16.


@pytest.mark.parametrize(
    ("model", "mesh"),
    [("llama", mesh) for mesh in MESHES] + [("qwen3_tied", mesh) for mesh in ("fsdp", "tp", "cp_tp", "hsdp_cp_tp")],
)
def test_five_steps_are_those_of_one_process(mesh, model):
    want = one_process(MODELS[model][0], torch.float64, MODELS[model][1])
    runs = run_on_mesh(mesh, MODELS[model], torch.float64, 5)
    check_run(runs, want, grads=1e-12, rest=1e-12, weights=1e-12)
    assert [r.is_tied for r in runs] == [MODELS[model][1]] * len(runs)


def test_norms_per_head_need_no_mention_in_the_plan():
    """Older versions of transformers leave them out; each rank's part of their gradient must still be summed."""
    want = one_process("qwen3", torch.float64, True)
    runs = run_on_mesh("tp", MODELS["qwen3_tied"], torch.float64, 1, unplanned="_norm")
    check_run(runs, want, grads=1e-12, rest=1e-12)


@pytest.mark.parametrize("mesh", MESHES)
def test_five_steps_in_fp32(mesh):
    want = one_process("llama", torch.float32, False)
    runs = run_on_mesh(mesh, MODELS["llama"], torch.float32, 5)
    check_run(runs, want, grads=5e-6, rest=2e-6, weights=5e-6)


@pytest.mark.parametrize("mesh", MESHES)
def test_the_models_own_loss_is_weighted_by_token(mesh):
    want = one_process("llama", torch.float32, False)
    runs = run_on_mesh(mesh, MODELS["llama"], torch.float32, 1, is_own_loss=False)
    check_run(runs, want, grads=5e-6, rest=2e-6)


@pytest.mark.parametrize("mesh", ["cp", "cp_tp"])
def test_another_layout(mesh):
    want = one_process("llama", torch.float64, False)
    check_run(run_on_mesh(mesh, MODELS["llama"], torch.float64, 1, layout="striped"), want, grads=1e-12, rest=1e-12)


@pytest.mark.parametrize("mesh", ["cp", "cp_tp"])
def test_activation_checkpointing_recomputes_the_same(mesh):
    want = one_process("llama", torch.float64, False)
    runs = run_on_mesh(mesh, MODELS["llama"], torch.float64, 1, activation_checkpointing=True)
    check_run(runs, want, grads=1e-12, rest=1e-12)
    assert [r.layer_calls for r in runs] == [2] * len(runs)
    assert run_on_mesh(mesh, MODELS["llama"], torch.float64, 1)[0].layer_calls == 1


def parameters(rank, world_size, sizes):
    """Whether names are kept, the kinds of the parameters, and the axes of their meshes."""
    mesh = mesh_of(sizes)
    model = build("qwen3", torch.float32)
    names = list(model.state_dict())
    assert parallelize(model, mesh, activation_checkpointing=True) is model
    kinds = {type(p).__name__ for p in model.parameters()}
    return names == list(model.state_dict()), kinds, {p.device_mesh.ndim for p in model.parameters()}


@pytest.mark.parametrize("mesh", ["tp", "cp_tp"])
def test_every_parameter_is_a_dtensor_of_one_mesh_and_keeps_its_name(mesh):
    sizes = MESHES[mesh]
    assert run(math.prod(sizes), parameters, sizes) == [(True, {"DTensor"}, {2})] * math.prod(sizes)


def odd_vocabulary(rank, world_size, sizes, is_tied):
    """For a vocabulary that two ranks cannot share: the relative error of the logits, and whether each rank has it all."""
    want, model = (build("llama", torch.float64, is_tied=is_tied, vocab_size=255) for _ in range(2))
    tokens = torch.arange(2 * 16).view(2, 16) * 7
    parallelize(model, mesh_of(sizes))
    with torch.no_grad():
        got, want = model(input_ids=tokens).logits, want(input_ids=tokens).logits
    whole = [m.weight.placements[-1].is_replicate() for m in (model.lm_head, model.model.embed_tokens)]
    return ((got - want).norm() / want.norm()).item(), whole


@pytest.mark.parametrize("is_tied", [False, True])
def test_a_vocabulary_that_tp_does_not_divide_stays_whole(is_tied):
    for error, whole in run(2, odd_vocabulary, MESHES["tp"], is_tied):
        assert error <= 1e-12
        assert whole == [True, True]


def refusal(rank, world_size, sizes, kind):
    model = build(
        "llama",
        torch.float32,
        seed=rank if kind == "seeds" else 0,
        **{
            "heads": {"hidden_size": 48, "num_attention_heads": 3, "num_key_value_heads": 3},
            "kv": {"num_key_value_heads": 1},
        }.get(kind, {}),
        **{"features": {"intermediate_size": 127}}.get(kind, {}),
    )
    if rank == 1:
        weight = model.model.layers[1].mlp.up_proj.weight
        if kind == "meta":
            model.to("meta")
        if kind == "meta_part":
            model.lm_head.to("meta")
        if kind == "permuted":
            weight.data = weight.data.flip(0)
        if kind == "shape":
            model.model.norm.weight = torch.nn.Parameter(torch.ones(3))
        if kind == "dtype":
            model.model.norm.bfloat16()
    if kind == "meta_other":
        (model.lm_head if rank else model.model.embed_tokens).to("meta")
    if kind == "tied" and rank == 0:
        model.lm_head.weight = model.model.embed_tokens.weight
    if kind == "style":
        model.config.base_model_tp_plan = model.config.base_model_tp_plan | {"layers.*.mlp.up_proj": "diagonal"}
    if kind == "plan":
        model.config.base_model_tp_plan = None
    if kind == "inside":
        model.model.layers[1].register_parameter("gate", torch.nn.Parameter(torch.ones(1)))
    if kind == "quantized":
        model.config.quantization_config = {"quant_method": "bitsandbytes"}
    if kind == "other":
        model = torch.nn.Linear(2, 2)
    before = {name: type(p) for name, p in model.named_parameters()}
    try:
        parallelize(model, mesh_of(sizes))
    except (ValueError, NotImplementedError, RuntimeError) as error:
        unchanged = {name: type(p) for name, p in model.named_parameters()} == before
        return type(error).__name__, str(error), unchanged
    return None


REFUSALS = {
    "heads": (
        "ValueError",
        "LlamaForCausalLM has num_attention_heads=3 and tp_size is 2; tp_size must divide it. Lower tp_size.",
    ),
    "kv": ("ValueError", "num_key_value_heads=1 and tp_size is 2; tp_size must divide it. Lower tp_size."),
    "features": ("ValueError", "mlp.gate_proj has out_features=127 and tp_size is 2; tp_size must divide it."),
    "style": ("ValueError", "has the style 'diagonal' for model.layers.0.mlp.up_proj, which is not known here"),
    "plan": ("ValueError", "has no tensor parallel plan (config.base_model_tp_plan) and tp_size is 2. Set it to 1."),
    "inside": (
        "ValueError",
        "the parameter model.layers.1.gate of LlamaForCausalLM belongs to a module with modules inside",
    ),
    "quantized": (
        "ValueError",
        "model is a quantized LlamaForCausalLM; FSDP2 and TP need plain weights. Load it unquantized.",
    ),
    "other": ("ValueError", "model is a Linear, whose decoder layers are not in base_model.layers"),
    "seeds": (
        "RuntimeError",
        "parameters differ between ranks; the weights must be the same on every rank. Seed every rank alike",
    ),
    "permuted": ("RuntimeError", "parallelize: 1 of 30 parameters differ between ranks"),
    "meta": (
        "RuntimeError",
        "the number of parameters on the meta device is between 0 and 30; the model must be the same",
    ),
    "meta_part": ("RuntimeError", "the number of parameters on the meta device is between 0 and 1; the model"),
    "meta_other": ("RuntimeError", "parallelize: 2 of 30 parameters differ between ranks"),
    "shape": ("RuntimeError", "a hash of the parameters' names, shapes and dtypes is between"),
    "dtype": ("RuntimeError", "a hash of the parameters' names, shapes and dtypes is between"),
    "tied": ("RuntimeError", "model differs between ranks: the number of parameters is between 29 and 30, a hash of"),
}


@pytest.mark.parametrize("kind", REFUSALS)
def test_refusals_name_the_reason_on_every_rank_and_change_nothing(kind):
    error, message = REFUSALS[kind]
    answers = run(2, refusal, MESHES["tp"], kind)
    assert answers == [answers[0]] * 2
    name, text, unchanged = answers[0]
    assert (name, unchanged) == (error, True)
    assert message in text
