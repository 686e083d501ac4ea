"""Generation over a ring: token for token what one process generates."""

import pytest
import torch
import torch.distributed as dist
import transformers
from transformers import DynamicCache, StaticCache

import ringattn.hf as hf
from tests import processes

SIZES = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 32,
    "num_hidden_layers": 2,
    "head_dim": 8,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "pad_token_id": 0,
    "eos_token_id": None,
    "bos_token_id": None,
    "initializer_range": 0.3,  # or the next token is the last one
}
FAMILIES = {
    "llama": ("Llama", {}),
    "llama dynamic rope": (
        "Llama",
        {"max_position_embeddings": 8, "rope_parameters": {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4}},
    ),
    "qwen3": ("Qwen3", {}),
    "mistral": ("Mistral", {"sliding_window": 5}),
    "gemma2": ("Gemma2", {"sliding_window": 4, "query_pre_attn_scalar": 8}),
    "gpt_oss": ("GptOss", {"sliding_window": 4, "num_local_experts": 2, "num_experts_per_tok": 1}),
}
STEPS = 14


def make(family, attn_implementation):
    name, changes = FAMILIES[family]
    config = getattr(transformers, f"{name}Config")(**{**SIZES, **changes})
    torch.manual_seed(0)
    model = getattr(transformers, f"{name}ForCausalLM")._from_config(config, attn_implementation=attn_implementation)
    for parameter_name, parameter in model.named_parameters():
        if "sinks" in parameter_name:
            torch.nn.init.normal_(parameter)
    return model.eval()


def prompt(batch, n):
    """Tokens, the first row padded on the left."""
    torch.manual_seed(1)
    ids = torch.randint(1, 64, (batch, n))
    mask = torch.ones_like(ids)
    if batch > 1:
        ids[0, :3] = mask[0, :3] = 0
    return {"input_ids": ids, "attention_mask": mask}


def generate(rank, world_size, family, layout, batch, n, options):
    model = hf.attach(make(family, "ringattn"), dist.group.WORLD, layout)
    return told(model.generate(**prompt(batch, n), max_new_tokens=STEPS, **options))


GREEDY = {"do_sample": False, "return_dict_in_generate": True, "output_logits": True}


def told(found):
    """Tokens `[B, N]`, and the logits of each step."""
    return found.sequences, torch.stack(found.logits)


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize(("world_size", "layout", "batch", "n"), [(2, "zigzag", 2, 13), (3, "contiguous", 1, 2)])
def test_greedy_search_is_that_of_one_process(family, world_size, layout, batch, n):
    want, want_logits = told(make(family, "eager").generate(**prompt(batch, n), max_new_tokens=STEPS, **GREEDY))
    results = processes.run(world_size, generate, family, layout, batch, n, GREEDY)
    for found, logits in results:
        assert found.tolist() == want.tolist()
        torch.testing.assert_close(logits, want_logits, rtol=1e-4, atol=1e-4)
        torch.testing.assert_close(logits, results[0][1], rtol=0, atol=0)


@pytest.mark.parametrize("options", [{"do_sample": False, "num_beams": 3}, {"do_sample": True, "top_k": 8}])
def test_beams_and_samples_are_those_of_one_process(options):
    torch.manual_seed(0)
    want = make("mistral", "eager")
    torch.manual_seed(7)
    want = want.generate(**prompt(2, 9), max_new_tokens=STEPS, **options)
    for found in processes.run(2, generate_from_seed, options):
        assert found.tolist() == want.tolist()


def generate_from_seed(rank, world_size, options):
    model = hf.attach(make("mistral", "ringattn"), dist.group.WORLD)
    torch.manual_seed(7)
    return model.generate(**prompt(2, 9), max_new_tokens=STEPS, **options)


def call_with_cache(rank, world_size):
    """Logits of a prompt and of three tokens at once, and the rows in the cache after each."""
    model = hf.attach(make("llama", "ringattn"), dist.group.WORLD)
    ids = prompt(1, 9)["input_ids"]
    with torch.no_grad():
        first = model(input_ids=ids[:, :6], use_cache=True)
        rows = [first.past_key_values.layers[0].keys.shape[2]]
        then = model(input_ids=ids[:, 6:], past_key_values=first.past_key_values, position_ids=torch.arange(6, 9)[None])
        rows.append(then.past_key_values.layers[0].keys.shape[2])
    return first.logits, then.logits, rows


def test_the_cache_of_the_prompt_is_split_over_ranks():
    with torch.no_grad():
        want = make("llama", "eager")(**prompt(1, 9)).logits
    for first, then, rows in processes.run(3, call_with_cache):
        torch.testing.assert_close(first, want[:, 5:6])
        torch.testing.assert_close(then, want[:, 6:])
        assert rows == [2, 5]


@pytest.mark.parametrize("options", [{}, {"cache_implementation": "static"}, {"use_cache": False}])
@pytest.mark.parametrize("family", ["llama", "gemma2"])
def test_one_process_without_attach(family, options):
    model, dense = make(family, "ringattn"), make(family, "eager" if family == "gemma2" else "sdpa")
    found, want = (told(m.generate(**prompt(2, 13), max_new_tokens=STEPS, **GREEDY, **options)) for m in (model, dense))
    assert found[0].tolist() == want[0].tolist()
    torch.testing.assert_close(found[1], want[1], rtol=1e-4, atol=1e-4)


IDS = torch.arange(1, 7)[None]
POSITIONS = {"position_ids": torch.tensor([[6]])}


def cache_of(*args):
    cache = DynamicCache()
    cache.update(torch.zeros(1, 2, 4, 8), torch.zeros(1, 2, 4, 8), 0)
    return cache


@pytest.mark.parametrize(
    ("given", "error", "message"),
    [
        (lambda m: {"past_key_values": StaticCache(m.config, max_cache_len=8)}, NotImplementedError, "is a StaticCache.*; only a DynamicCache"),
        (lambda m: {"past_key_values": cache_of()}, ValueError, "holds 4 tokens that were not computed with the attached model; begin"),
        (lambda m: {"use_cache": True, "labels": IDS}, NotImplementedError, "labels are given with a cache; leave them out, or the cache"),
        (lambda m: {"use_cache": True, "logits_to_keep": 2}, NotImplementedError, "logits_to_keep is 2; for a prompt it must be 1"),
        (lambda m: {"use_cache": True, "return_dict": False}, NotImplementedError, "return_dict is False; with a cache it must be True"),
        (
            lambda m: {"use_cache": True, "attention_mask": torch.tensor([[1, 1, 1, 1, 1, 0]])},
            NotImplementedError,
            "attention_mask has zeros at its end, with a cache; pad prompts on the left",
        ),
        (
            lambda m: {"use_cache": True, "position_ids": torch.tensor([[0, 1, 2, 0, 1, 2]])},
            NotImplementedError,
            "the prompt has documents, with a cache; give each of them a batch row of its own",
        ),
    ],
)  # fmt: skip
def test_what_the_prompt_may_not_be(given, error, message):
    model = hf.attach(make("llama", "ringattn"), None)
    with pytest.raises(error, match=message), torch.no_grad():
        model(**{"input_ids": IDS, **given(model)})


def shorten(cache):
    cache.crop(-2)
    return {}


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (lambda cache: {"position_ids": None}, "position_ids is None with a cache that holds a prompt; give them"),
        (lambda cache: {"attention_mask": torch.ones(1, 5)}, "attention_mask has 5 tokens; the cache holds 6 and 1 are new"),
        (lambda cache: {"attention_mask": torch.tensor([[1] * 6 + [0]])}, "attention_mask hides new tokens"),
        (shorten, "a layer's cache holds 5 rows and should hold 7; a cache that was cut is not supported"),
        (lambda cache: {"use_cache": False}, "use_cache is False with"),
        (
            lambda cache: {"cache_position": torch.tensor([5])},
            r"cache_position is a tensor .* from \[5\]; the cache holds 6 tokens, and it must go on from there",
        ),
    ],
)  # fmt: skip
def test_what_new_tokens_may_not_be(given, message):
    model = hf.attach(make("llama", "ringattn"), None)
    with torch.no_grad():
        cache = model(input_ids=IDS, use_cache=True).past_key_values
        changes = given(cache)
        with pytest.raises(NotImplementedError, match=message):
            model(**{"input_ids": IDS[:, :1], "past_key_values": cache, **POSITIONS, **changes})


def test_attach_leaves_dynamic_frequencies_alone():
    fresh, attached = make("llama dynamic rope", "ringattn"), hf.attach(make("llama dynamic rope", "ringattn"), None)
    for name, buffer in fresh.model.rotary_emb.named_buffers():
        torch.testing.assert_close(attached.model.rotary_emb.get_buffer(name), buffer, rtol=0, atol=0)
    assert attached.model.rotary_emb.max_seq_len_cached == fresh.model.rotary_emb.max_seq_len_cached
