"""Training on a device mesh of data, context and tensor parallel ranks.

mesh = init_mesh(NDConfig(dp_shard_size=2, cp_size=2))
parallelize(model, mesh)
loss = model(input_ids=batch, labels=batch).loss     # the whole batch, the same on every cp and tp rank
loss.backward()
clip_grad_norm_(model, 1.0)
"""

from ndwrap.checkpoint import export_hf, latest_step, load_checkpoint, save_checkpoint
from ndwrap.clip import clip_grad_norm_
from ndwrap.config import NDConfig
from ndwrap.loss import global_loss
from ndwrap.mesh import init_mesh
from ndwrap.parallelize import parallelize

__all__ = [
    "NDConfig",
    "clip_grad_norm_",
    "export_hf",
    "global_loss",
    "init_mesh",
    "latest_step",
    "load_checkpoint",
    "parallelize",
    "save_checkpoint",
]
