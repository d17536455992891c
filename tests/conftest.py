"""Set before any test module is imported: a transformers model imports triton, which reads its flag once."""

import os

import torch

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"

# Tiny models run 20 to 50 times faster on one thread.
torch.set_num_threads(1)
