"""LoRA adapters of PEFT in an attached model: loss and gradients are those of one process."""

import pytest
import torch
import torch.distributed as dist
from transformers import LlamaConfig, LlamaForCausalLM

import ringattn.hf as hf
from tests import processes

pytest.importorskip("peft", reason="needs peft")


def adapted(attn_implementation, group=None, attach=None):
    """A model with adapters; attached before them, to the model inside, or to the whole afterwards."""
    from peft import LoraConfig, get_peft_model

    sizes = {"vocab_size": 32, "hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 2}
    config = LlamaConfig(**sizes, num_attention_heads=2)
    torch.manual_seed(0)
    model = LlamaForCausalLM._from_config(config, attn_implementation=attn_implementation)
    if attach == "before":
        hf.attach(model, group)
    torch.manual_seed(1)
    lora = LoraConfig(r=2, target_modules=["q_proj", "v_proj"], init_lora_weights=False)
    whole = get_peft_model(model, lora)
    if attach == "inside":
        hf.attach(whole.get_base_model(), group)
    elif attach == "after":
        hf.attach(whole, group)
    return whole


def step(model):
    torch.manual_seed(2)
    tokens = torch.randint(32, (2, 9))
    loss = model(input_ids=tokens, labels=tokens).loss
    loss.backward()
    return loss.detach(), {name: p.grad for name, p in model.named_parameters() if p.requires_grad}


def step_on_a_ring(rank, world_size, attach):
    loss, grads = step(adapted("ringattn", dist.group.WORLD, attach))
    for x in (loss, *grads.values()):
        dist.all_reduce(x)
        x /= world_size
    return loss, grads


@pytest.mark.parametrize("attach", ["before", "inside", "after"])
def test_adapters_train_as_in_one_process(attach):
    loss, grads = step(adapted("sdpa"))
    assert len(grads) == 8
    for found, found_grads in processes.run(2, step_on_a_ring, attach):
        torch.testing.assert_close(found, loss, rtol=1e-5, atol=0)
        assert found_grads.keys() == grads.keys()
        for name, grad in grads.items():
            assert grad.abs().max() > 0
            torch.testing.assert_close(found_grads[name], grad, rtol=1e-4, atol=1e-6)


def test_check_sees_through_the_wrapper():
    assert "LlamaForCausalLM, 9 tokens, batch 1, rank 0 of 2" in hf.check(
        adapted("ringattn"), {"input_ids": torch.zeros(1, 9, dtype=torch.long)}, world_size=2
    )
