"""Vision-language models and encoder-decoders: text alone is right on a ring, everything else is refused by name."""

import functools
import re
from typing import Any

import pytest
import torch

pytest.importorskip("transformers", minversion="5")

from ringattn import hf
from tests.processes import run
from tests.sweep import make, quiet, sweep

VISION = ("LlavaForConditionalGeneration", "Qwen3VLForConditionalGeneration", "Gemma3ForConditionalGeneration")
ENCODER_DECODER = ("BartForConditionalGeneration", "MBartForConditionalGeneration", "T5ForConditionalGeneration")
IDS = torch.arange(10, 22)[None]


@functools.cache
def attached(name: str) -> Any:
    with quiet():
        return hf.attach(make(name, "ringattn"), None)


@pytest.mark.parametrize("world_size", [3])
def test_text_alone_in_a_vision_language_model_is_that_of_one_process(world_size: int) -> None:
    for found in run(world_size, sweep, VISION):
        assert {name: result.kind for name, result in found.items()} == dict.fromkeys(VISION, "right"), found


@pytest.mark.parametrize("name", VISION)
@pytest.mark.parametrize(
    ("argument", "value", "kind", "words"),
    [
        ("pixel_values", torch.zeros(1, 3, 28, 28), NotImplementedError, "pixel_values is a tensor of shape"),
        ("token_type_ids", torch.zeros_like(IDS), NotImplementedError, "token_type_ids is a tensor of shape (1, 12)"),
        ("position_ids", torch.arange(12).expand(3, 1, 12), ValueError, "position_ids has shape (3, 1, 12)"),
    ],
)
def test_images_and_their_positions_are_refused(
    name: str, argument: str, value: torch.Tensor, kind: type[Exception], words: str
) -> None:
    with pytest.raises(kind, match=f"{name} with ringattn.hf: {re.escape(words)}"):
        attached(name)(input_ids=IDS, **{argument: value})


@pytest.mark.parametrize("name", ENCODER_DECODER)
def test_an_encoder_with_its_decoder_is_refused(name: str) -> None:
    with quiet(), pytest.raises(NotImplementedError, match=f"{name} is an encoder and a decoder, which see each other"):
        hf.attach(make(name, "ringattn"), None)
