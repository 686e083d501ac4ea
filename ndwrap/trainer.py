"""The Trainer of transformers with ring attention: one callback.

    args = TrainingArguments(..., parallelism_config=RingParallelismConfig(dp_shard_size=2, cp_size=4))
    Trainer(model, args, train_dataset=..., callbacks=[RingAttnCallback()]).train()

Trainer counts labelled tokens, scales the loss and averages gradients by itself, and is right to: the loss of a rank is its rows' sum over the
labelled tokens of the whole step. Trainers that subclass it and leave the loss to the model, such as TRL's SFTTrainer, take the callback too.
"""

from typing import Any

from accelerate.state import AcceleratorState
from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from ndwrap.accelerate import attach_by_state

__all__ = ["RingAttnCallback"]

WHO = "RingAttnCallback"


class RingAttnCallback(TrainerCallback):
    """Attaches the model when the Trainer has been made: tensor parallelism and ring attention over the axes of its
    `parallelism_config`, which must be a `RingParallelismConfig`.

    Losses, gradient norms and evaluation losses that the Trainer logs are those of one process with all data. In evaluation outputs
    have no logits, of which a rank has some rows only: `compute_metrics` gets none.

    Args:
        layout: which positions of the sequence each cp rank holds, default "zigzag". options: those of `ringattn.hf.attach`.

    Raises:
        NotImplementedError: when the Trainer is made, or in its first step: what computes a loss outside of the model (label smoothing,
            `compute_loss_func`, losses of TRL other than its default, GRPO), the Liger kernel, or averaging without counting tokens.
    """

    def __init__(self, layout: Any = "zigzag", **options: Any) -> None:
        self.layout, self.options = layout, options

    def on_init_end(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        model: Any = None,
        **kwargs: Any,
    ) -> None:
        for name, good, why in (
            ("label_smoothing_factor", 0.0, "it needs whole rows of labels and logits on one rank"),
            ("use_liger_kernel", False, "it makes the loss of this rank's rows alone"),
            ("average_tokens_across_devices", True, "ranks have different numbers of labelled tokens"),
        ):
            if (value := getattr(args, name, good)) != good:
                raise NotImplementedError(f"{WHO}: {name} is {value!r}; it must be {good!r}: {why}.")
        attach_by_state(WHO, model, AcceleratorState(), self.layout, loss_scale="caller", **self.options)
